"""Counts of tokens in whole pages of the KV pool. With pages of one token they change nothing."""


def page_floor(tokens: int, page_tokens: int) -> int:
    """Tokens of the whole pages among so many."""
    return tokens // page_tokens * page_tokens


def page_ceil(tokens: int, page_tokens: int) -> int:
    """Slots of the pages that hold so many."""
    return -(-tokens // page_tokens) * page_tokens
