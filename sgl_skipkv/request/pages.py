"""Counts of tokens in whole pages of the KV pool. With pages of one token they change nothing."""


def page_floor(tokens: int, page_tokens: int) -> int:
    """The largest multiple of ``page_tokens`` that is at most ``tokens``."""
    return tokens // page_tokens * page_tokens


def page_ceil(tokens: int, page_tokens: int) -> int:
    """The smallest multiple of ``page_tokens`` that is at least ``tokens``."""
    return -(-tokens // page_tokens) * page_tokens
