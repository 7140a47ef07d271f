"""pass@k without bias. Pure.

With n attempts of which c passed, pass@k = 1 - C(n-c, k) / C(n, k): the chance that k attempts drawn without putting
back hold at least one that passed (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1).
"""

from collections.abc import Sequence
from math import comb


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return pass@k of one task. Needs 1 <= k <= n and 0 <= passed <= n."""
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"pass@{k} of {passed} passed in {n}")
    return 1.0 - comb(n - passed, k) / comb(n, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Return the mean over tasks, each as (n, passed), that have at least k attempts; None when no task has."""
    values = [pass_at_k(n, passed, k) for n, passed in counts if n >= k]
    return sum(values) / len(values) if values else None


def ks(n: int) -> list[int]:
    """Return the k that are shown for n attempts: 1, 2, 4, … and n itself."""
    powers = [1 << i for i in range(n.bit_length()) if 1 << i <= n]
    return powers if not powers or powers[-1] == n else [*powers, n]
