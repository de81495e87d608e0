"""Scores and kept sets against numbers that the authors' own programs gave on the same inputs.

The other tests compare a policy with formulas that were read from a paper here; a misreading would
be on both sides. Each program's scoring ran once on the inputs below, in float32, and what it gave
stands here. Where a program chooses per layer and KV head, there is one of each.

LazyEviction's numbers are in ``test_policy_scores.py``. Crystal-KV's program was not found.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from score_inputs import some_sentences
from torch import Tensor

from sgl_skipkv.eviction.select import select_together
from sgl_skipkv.kernels.reference import causal_attention
from sgl_skipkv.policy import make_policy
from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.query_centres import QueryCentres, Rotation
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Steps

TOKENS, WINDOW, KEPT, HEAD_DIM = 24, 4, 12, 8
#: of numbers written in millionths, float32 against float32
TOLERANCE = 2e-6
FREE = {"sink": 0, "protect_prompt": False, "window": WINDOW}
LAST = {**FREE, "window": 1}
ROTATION = Rotation.of(10000.0 ** (-torch.arange(4) / 4), HEAD_DIM)


def numbers(*shape: int, start: int) -> Tensor:
    """From -1 to 1, of integers alone, so the same with every version of torch."""
    i = torch.arange(math.prod(shape)) + 100 * start
    return ((7919 * i * i + 104729 * i) % 2003 / 1001 - 1).reshape(shape)


def keys(start: int, layers: int = 1, heads: int = 1) -> Tensor:
    """[layers, n, Hkv, d], each like some others: every key has one of cosine above 0.5."""
    groups = numbers(layers, 3, heads, HEAD_DIM, start=start)
    own = numbers(layers, TOKENS, heads, HEAD_DIM, start=start + 20)
    return groups[:, torch.arange(TOKENS) ** 2 % 7 % 3] + 0.6 * own


def queries(start: int, heads: int = 2, count: int = WINDOW, layers: int = 1) -> Tensor:
    """[layers, count, Hq, d], oldest first."""
    return 3 * numbers(layers, count, heads, HEAD_DIM, start=start)


def seen(k: Tensor, q: Tensor, **others: Any) -> ScoreInput:
    n = k.shape[1]
    values = numbers(len(k), n, k.shape[2], HEAD_DIM, start=5)
    inputs = ScoreInput(
        positions=torch.arange(n),
        prompt_tokens=0,
        keep_tokens=KEPT,
        layers=len(k),
        keys=lambda layer: k[layer],
        queries=lambda: q.flip(1),
        values=lambda layer: values[layer],
        reach=torch.ones(len(k), k.shape[2]),
        scale=HEAD_DIM**-0.5,
        sentences=None,
        seed=1,
        logical_tokens=n,
    )
    return dataclasses.replace(inputs, **others)


def floats(millionths: str) -> list[float]:
    return [int(word) / 1e6 for word in millionths.split()]


def assert_gives(policy: Policy, inputs: ScoreInput, exact: str, kept: list[int]) -> None:
    """exact: millionths, the program's scores from the first token on that may go."""
    n, (first, _) = len(inputs.positions), policy.candidates(inputs)
    scores = policy.scores(inputs)
    given = floats(exact)
    found = scores[first : first + len(given)].tolist()
    assert found == pytest.approx(given, rel=TOLERANCE, abs=TOLERANCE)
    tail = max(policy.pinned_tail_tokens, policy.protected_tail(KEPT))
    (chosen,), _ = select_together([scores], [[(0, first), (n - tail, n)]], [KEPT])
    assert inputs.positions[chosen.kept].tolist() == kept


PLAIN = seen(keys(1), queries(3))
SENTENCES = some_sentences((0, 6, 0.97), (6, 12, -1.0), (12, 18, 0.96), (18, 22, -1.0))
WIDE, CALIBRATION = keys(7, heads=2), queries(13, 4, 10, 2) + 2 * numbers(2, 1, 4, 8, start=17)
CENTRES = [(b.mean(dim=0), b.abs().mean(dim=0)) for b in ROTATION.bands(CALIBRATION)]
BOTH_LAYERS = QueryCentres.of_means(ROTATION, CENTRES)
CASES = {
    # Zefan-Cai/R-KV, rkv/compression/r1_kv.py (31cf555) and rkv/utils.py (cc5a9b9)
    "R-KV": (
        *(make_policy("rkv", kernel=3, sigma=0.5, **FREE), PLAIN),
        "19934 12701 13327 18049 4337 13295 9371 17541 13957 12207 14863 1082 3439 1197 23359 "
        "15535 16554 1328 19731 10678",
        [0, 3, 7, 10, 14, 15, 16, 18, 20, 21, 22, 23],
    ),
    # TTTTTTris/SkipKV, skipkv/compression/snapkv.py (4492840): R-KV's adaptation to decoding
    "SnapKV": (
        *(make_policy("snapkv", kernel=3, **FREE), PLAIN),
        "70674 75935 75935 75935 49637 67486 67486 67486 72813 72813 72813 39010 47351 47351 79965 "
        "79965 79965 41693 71445 71445",
        [1, 2, 3, 9, 10, 14, 15, 16, 20, 21, 22, 23],
    ),
    # TTTTTTris/SkipKV, skipkv/compression/skipkv.py and skipkv/utils.py (4492840)
    "SkipKV": (
        make_policy("skipkv", kernel=3, **FREE),
        dataclasses.replace(PLAIN, sentences=SENTENCES),
        "-990658 -1007885 -1006759 -998260 -1001904 -1000057 -37121 -22415 -33127 -36277 -31496 "
        "-29260 -991690 -995727 -981925 -996009 -994175 -990965 -21641 -37935",
        [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23],
    ),
    # schwartz-lab-NLP/TOVA, src/tova_cache.py (275cf5f)
    "TOVA": (
        *(make_policy("tova", **LAST), seen(WIDE, queries(3, 4, 1))),
        "42903 22567 31578 32229 50528 20743 32748 76195 31372 34552 81709 21129 34802 22987 43039 "
        "30610 30014 66768 57259 29593 47729 67477 26101 65368",
        [0, 4, 7, 9, 10, 12, 14, 17, 18, 20, 21, 23],
    ),
    # jiwonsong-dev/ReasoningPathCompression, rpc/rpc_utils.py (eb0b5fd), prompt of 4
    "RPC": (
        make_policy("rpc", kernel=3, interval=16, ratio=4, window=WINDOW),
        seen(WIDE, queries(3, 4), prompt_tokens=4),
        "140089 225473 235008 249969 252079 256611 227885 224130 199681 223950 248867 300533 "
        "333531 302284 266674 157909",
        [0, 1, 2, 3, 15, 16, 17, 18, 20, 21, 22, 23],
    ),
    # NVIDIA/kvpress, kvpress/presses/keydiff_press.py (08a43bf)
    "KeyDiff": (
        *(make_policy("keydiff", **FREE), PLAIN),
        "261488 -841941 -786051 -311730 -373910 -370138 -761634 148724 -578363 -745736 -486525 "
        "-263930 -347001 -581344 11552 -768513 -673586 -266511 -61613 -822299",
        [0, 3, 7, 11, 12, 14, 17, 18, 20, 21, 22, 23],
    ),
    # NVIDIA/kvpress, kvpress/presses/expected_attention_press.py (08a43bf), queries of the window
    "Expected Attention": (
        make_policy("expected", **{**FREE, "sink": 4}),
        dataclasses.replace(PLAIN, centres=BOTH_LAYERS),  # for its rotation alone
        "106059 71557 103136 145320 115002 69296 69206 88693 84977 76964 136619 105168 104670 "
        "104234 127485 95328",
        [0, 1, 2, 3, 7, 8, 14, 18, 20, 21, 22, 23],
    ),
    # WeianMao/triattention, triattention/methods/triattention.py (1129a5f), pruning_utils.py
    # (092e4dc): its union of heads, normalised, without noise, of a prompt of 4
    "TriAttention": (
        make_policy("triattention", sink=0, window=1),
        seen(keys(11, 2, 2), queries(3, 4), prompt_tokens=4, centres=BOTH_LAYERS),
        "2333950 1290399 450885 2518872 423002 722576 1557088 1122731 46557 549147 1906128 871358 "
        "1496997 2003351 1687213 1031548 716804 1838479 831387",
        [0, 1, 2, 3, 4, 7, 10, 14, 17, 18, 21, 23],
    ),
    # mit-han-lab/streaming-llm, streaming_llm/kv_cache.py (d729b3f)
    "StreamingLLM": (
        *(make_policy("streaming", **{**LAST, "sink": 4}), PLAIN),
        *("", [0, 1, 2, 3, 16, 17, 18, 19, 20, 21, 22, 23]),
    ),
}


@pytest.mark.parametrize("program", CASES)
def test_one_compaction(program: str) -> None:
    assert_gives(*CASES[program])


def after_steps(policy: Policy, attention: Tensor) -> ScoreInput:
    """attention: [steps, n], the last step is that of the newest token."""
    times = torch.arange(TOKENS - len(attention), TOKENS)[:, None].expand(attention.shape)
    before = policy.initial_statistics(PLAIN.positions)
    statistics = policy.follow(before, Steps(attention, times, [TOKENS]))
    return dataclasses.replace(PLAIN, statistics=statistics)


def test_h2o_after_fourteen_steps() -> None:
    """FMInference/H2O, h2o_hf/utils_real_drop/modify_llama.py (0ee6a85): half heavy hitters, half
    recent. Nothing was counted in its prefill of ten, and it evicted once, at the end."""
    attention = (numbers(14, TOKENS, start=29) + 1).tril(diagonal=TOKENS - 14)
    exact = (
        "14997003 11800200 14005993 13610390 14615385 15019981 12823176 14027972 8629371 16637363 "
        "14039960 11649350 10425574 9272728 11096903 10800200 9287712 3462538 6235765 4505494 "
        "3178821 1159840 1354645 666334"
    )
    policy = make_policy("h2o", **FREE)
    kept = [0, 4, 5, 7, 9, 10, 18, 19, 20, 21, 22, 23]
    assert_gives(policy, after_steps(policy, attention), exact, kept)


def test_raas_timestamps() -> None:
    """DerekHJH/RaaS, quest/raas_utils/controller.py (759ad28), pages of one token, 12 of them.

    It stamps the better half of its pages at each step, here those that got attention, and evicts a
    page a step; evicted ones got none. A stamp is its count of tokens, ours the position: 1 less.
    """
    attention = torch.zeros(16, TOKENS)
    for step in range(8, TOKENS):
        milestone = 4 if step < 16 else 9 if step < 20 else 14
        attention[step - 8, [0, 3, milestone, step - 3, step - 2, step - 1]] = 1.0
    policy = make_policy("raas", alpha=0.5, **LAST)
    inputs, kept = after_steps(policy, attention), [0, 3, 9, 14, *range(16, TOKENS)]
    assert_gives(policy, inputs, "", kept)
    stamps = [24, 24, 20, 24, 20, 21, 22, 23, 24, 24, 24, 24]
    assert (policy.scores(inputs)[kept] + 1).tolist() == stamps


def test_vase_ranges_and_what_is_drawn_in_proportion_to() -> None:
    """terarachang/VaSE, eval/reasoning_tasks/modified/transformers/cache_utils.py (17df0fa)."""
    kept = [0, 4, 5, 6, 7, 8, 16, 18, 20, 21, 22, 23]
    assert_gives(make_policy("vase", large=1.0, **FREE), PLAIN, "", kept)
    scores = make_policy("vase", large=0.25, **FREE).scores(PLAIN)[:-WINDOW].double()
    large = scores > 500
    assert large.nonzero().flatten().tolist() == [16, 18]
    noise = -np.log(-np.log(np.random.Generator(np.random.PCG64(PLAIN.seed)).random(len(scores))))
    attended = (scores - 1000 * large - torch.from_numpy(noise)).exp() / WINDOW
    exact = (
        "33498 40633 48139 44716 46742 48490 51909 57932 55193 53940 49236 47660 41297 46264 44877 "
        "44262 47672 52631 39819 32147"
    )
    # In float32 a thousand stands in front of two of the logarithms.
    assert attended.tolist() == pytest.approx(floats(exact), rel=1e-4)


def test_gkv_carries_attention_from_one_compaction_to_the_next() -> None:
    """microsoft/G-KV, gkv/model/compression/score_based.py (345e290), similarity in plain form."""
    policy, k = make_policy("gkv", **FREE), keys(37)
    first = [0, 2, 3, 4, 7, 8, 10, 11, 14, 15, 16, 17]
    exact = (
        "-169930 -345050 -262042 195161 -17104 -326004 -317980 -117773 -221416 -337334 -15690 "
        "40593 -319215 -348701"
    )
    again = (
        "-169615 -178296 57777 -131799 -185799 61138 88577 -38521 -246102 -222209 -294454 -84457 "
        "-167313 -246638"
    )
    then, attended = [0, 3, 4, 8, 10, 11, 17, 18, 20, 21, 22, 23], torch.zeros(0)
    rows = [*range(18)], [*first, *range(18, TOKENS)]
    for row, start, scores, kept in zip(rows, (3, 41), (exact, again), (first, then), strict=True):
        q, positions = queries(start), torch.tensor(row)
        new = policy.initial_statistics(positions[len(attended) :])["attended"]
        received = causal_attention(q[0], k[0, row], over=policy.attention_over)
        steps = Steps(received, positions[-WINDOW:, None].expand(received.shape), [len(row)])
        statistics = policy.follow({"attended": torch.cat([attended, new])}, steps)
        inputs = seen(k[:, row], q, positions=positions, statistics=statistics)
        assert_gives(policy, inputs, scores, kept)
        attended = statistics["attended"][torch.isin(positions, torch.tensor(kept))]
