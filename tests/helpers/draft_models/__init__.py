"""Draft models that a server of the tests finds here: ``SGLANG_EXTERNAL_MODEL_PACKAGE``."""
