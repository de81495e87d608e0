"""Commands: ``skipkv`` and the server process that tests and benchmarks start."""
