"""An exact top-k in plain numpy, and rows of scores that are hard to pick from."""

import numpy as np

SMALLEST = np.float32(1e-45)  # the smallest denormal number


def best(scores, visible, top_k):
    """The picked entries of each row, sorted, then -1."""
    picked = np.full((len(scores), top_k), -1, np.int32)
    for row, score, seen in zip(picked, scores, visible, strict=True):
        seen = min(max(int(seen), 0), len(score))
        chosen = np.argsort(-score[:seen].astype(np.float64), kind="stable")[:top_k] if seen > top_k else range(seen)
        row[: len(chosen)] = np.sort(chosen)
    return picked


def in_order(picked):
    """Rows of entries, sorted up to the -1 at their ends, which must be packed."""
    picked = np.array(picked)
    for index in np.ndindex(picked.shape[:-1]):
        row = picked[index]
        count = (row >= 0).sum()
        assert (row[count:] == -1).all()
        row[:count].sort()
    return picked


def random_bits(rng, size):
    return rng.integers(0, 2**32, size, dtype=np.uint64).astype(np.uint32).view(np.float32)


KINDS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "ties": lambda rng, n: np.round(2 * rng.standard_normal(n)),
    "two values": lambda rng, n: rng.choice([1.5, -3], n),
    "all equal": lambda rng, n: np.full(n, rng.standard_normal()),
    "zeros": lambda rng, n: rng.choice([0.0, -0.0], n),
    "denormals": lambda rng, n: rng.integers(-9, 9, n) * SMALLEST,
    "around zero": lambda rng, n: rng.choice([0.0, -0.0, SMALLEST, -SMALLEST, 1e-38, -1e-38], n),
    "infinities": lambda rng, n: rng.choice([np.inf, -np.inf, 3e38, -3e38, 1], n),
    "lowest": lambda rng, n: np.full(n, -np.inf),
    "neighbours": lambda rng, n: (0x3F800000 + rng.integers(0, n, n, dtype=np.int32)).view(np.float32),
    "far apart": lambda rng, n: np.where(rng.random(n) < 0.01, 1e30, rng.standard_normal(n) * SMALLEST),
    "rising": lambda rng, n: np.arange(n),
    "falling": lambda rng, n: -np.arange(n),
    "any bits": lambda rng, n: (lambda x: np.where(np.isnan(x), 1, x))(random_bits(rng, n)),
}


def rows(kinds, num_scores, visible, seed=0):
    """float32 scores, a row of each kind, of any bits from `visible` on."""
    rng = np.random.default_rng(seed)
    made = []
    for kind, seen in zip(kinds, visible, strict=True):
        row = np.asarray(KINDS[kind](rng, num_scores), np.float32)
        seen = min(max(int(seen), 0), num_scores)
        row[seen:] = random_bits(rng, num_scores - seen)
        row[seen:][::3] = np.nan
        made.append(row)
    return np.stack(made)


def edges(num_scores, top_k):
    """Numbers of visible entries at which something changes."""
    counts = (0, 1, top_k - 1, top_k, top_k + 1, num_scores - 1, num_scores)
    return np.array([min(max(count, 0), num_scores) for count in counts], np.int32)
