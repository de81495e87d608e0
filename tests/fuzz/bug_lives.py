"""In which lives the planted bugs are found (``planted_bugs.py``)."""

from __future__ import annotations

#: bug -> the first seed whose first few lives find it; 4 or 5 where nothing is said
SOONEST = {
    "a part forgets what the others freed": 6,
    "the input of a backup that was forgotten stays short": 14,
    "a pause leaves a request that cannot be recomputed in the queue": 11,
    "a shared history is compacted without a copy": 6,
    "the lock on a history is kept": 6,
    "the whole history stays locked": 6,
    "another cache_salt's request continues a history": 27,
    "another extra_key's request continues a history": 35,
    "a sentence goes on behind its turn": 7,
    "a continued row has the recordings of whoever held its track before": 9,
    "recordings of a history are never let go": 7,
    "a share counts the evictions that the request reports": 6,
    "a steered history is continued without steering": 6,
    "backups have no bound": 6,
    "tokens that are computed again are not steered": 9,
    "a request that comes back is steered as at its start": 9,
    "a demand is that of the row before the last compaction": 13,
    "a demand is measured without the queries of a prefill": 6,
    "a history is shared although its demand may evict from it": 43,
    "the page that a prompt ends in is shared with who evicts behind it": 6,
    "what is restored is steered as at its start": 12,
    "who waits with a row is ended by a pause as if it had none": 13,
    "a decode server waits for a prefill": 7,
    "recordings do not come back": 7,
}
#: found in a hundred lives and more: ``make fuzz`` plants them, ``make test-slow`` does not
RARE = {
    "all but one request of a part are left out",
    "a restored row is not paid for",
    "a request that ends while it waits keeps host memory",
    "two histories have the same keys",
    "a prompt that is a history as a whole leaves nothing to compute",
    "SGLang files the text of a prompt that contains a history",
    "another policy's request continues a history",
}
#: of pages of several tokens
IN_PAGES = {
    "slots move and not KV",
    "KV is overwritten before it is read",
    "a page without tokens is kept",
    "the page of the last tokens is freed",
    "a restored row begins within a page",
    "a history's last page is shared with who goes on in it",
    "the page that a prompt ends in is shared with who evicts behind it",
    "the last page of a history is taken for there",
    "the last page of a history is filed under one slot",
}
#: of HiCache
IN_HOST = {
    "the rest of a history's last page is loaded as a part of its row",
    "a row is longer by the rest of its last page that was loaded",
    "a history is copied before it has been loaded",
    "a restored row is loaded as well",
}
