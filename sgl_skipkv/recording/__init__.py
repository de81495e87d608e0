"""What decoding leaves for the next compaction: recent queries and sentence vectors."""
