import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_ppo.algo.noise import base_key, gumbel, random_bits, row_keys, to_gumbel

M32, M64 = 2**32 - 1, 2**64 - 1


def mix(z):
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & M64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def absorb(z, x):
    return mix(z + 0x9E3779B97F4A7C15 * (x + 1) & M64)


def reference_bits(seed, stream, iteration, index, t, token):
    """The recipe of the module's docstring in Python's integers."""
    key = 0
    for x in (seed, stream, iteration, index, t):
        key = absorb(key, x)
    h = token * 0x9E3779B9 + key & M32
    h ^= h >> 16
    h = h * 0x7FEB352D & M32
    h ^= h >> 15
    h = (h + (key >> 32)) * 0x846CA68B & M32
    return (h ^ h >> 16) & 0x7FFFFFFF


def bits(seed, iteration, index, t, vocab, stream=0):
    return random_bits(row_keys(base_key(seed, iteration, stream), torch.as_tensor(index), t), vocab)


@given(
    seed=st.integers(0, 2**64),
    stream=st.integers(0, 9),
    iteration=st.integers(0, 2**40),
    index=st.integers(0, 2**40),
    t=st.integers(0, 2**20),
)
def test_the_integers_follow_the_recipe(seed, stream, iteration, index, t):
    want = [reference_bits(seed, stream, iteration, index, t, token) for token in range(5)]
    assert bits(seed, iteration, [index], t, 5, stream).tolist() == [want]
    assert bits(seed, iteration, [index], torch.tensor([t], dtype=torch.int32), 5, stream).tolist() == [want]


def test_golden_integers():
    """To check a port against."""
    assert base_key(0, 0) == 2558736989570252433
    assert row_keys(base_key(0, 0), torch.tensor([0, 1]), 0).tolist() == [8695987549771912286, -4027250414279178457]
    assert bits(0, 0, [0, 1], 0, 3).tolist() == [
        [84133509, 2031360728, 1696596086],
        [1493240169, 804719857, 1036586768],
    ]
    assert bits(1234, 56, [78], 9, 50_000, stream=2)[0, -3:].tolist() == [1386222472, 1462465079, 196112263]
    got = gumbel(0, 0, torch.tensor([0, 1]), 0, 3)
    assert got.dtype == torch.float32
    assert_close(
        got,
        torch.tensor([[3.2197306, -1.0706939, -0.44522032], [-0.17275304, 0.75594479, 0.41683587]]),
        rtol=1e-6,
        atol=1e-6,
    )


def test_a_row_does_not_depend_on_its_batch_nor_an_id_on_the_vocabulary():
    index = torch.tensor([5, 900, 0, 5])
    whole = gumbel(3, 7, index, torch.tensor([1, 2, 3, 1]), 257)
    assert torch.equal(whole[0], whole[3])
    for row, (i, t) in enumerate([(5, 1), (900, 2), (0, 3)]):
        assert torch.equal(gumbel(3, 7, torch.tensor([i]), t, 257)[0], whole[row])
    assert torch.equal(gumbel(3, 7, index, torch.tensor([1, 2, 3, 1]), 100), whole[:, :100])
    assert torch.equal(gumbel(3, 7, index, 4, 9), gumbel(3, 7, index, torch.tensor(4), 9))
    assert torch.equal(index, torch.tensor([5, 900, 0, 5]))


def test_a_tensor_base_gives_the_same_keys():
    base, index = base_key(1, 2), torch.arange(4)
    assert torch.equal(row_keys(torch.tensor(base), index, 3), row_keys(base, index, 3))


def test_every_coordinate_matters():
    names = ("seed", "iteration", "index", "t", "stream")
    seen = set()
    for name in (None, *names):
        at = {n: 1 + (n == name) for n in names}
        got = gumbel(at["seed"], at["iteration"], torch.tensor([at["index"]]), at["t"], 8, stream=at["stream"])
        seen.add(tuple(got[0].tolist()))
    # none may trade places with another either
    for order in set(itertools.permutations([1, 2, 3, 4, 5])):
        seed, iteration, index, t, stream = order
        seen.add(tuple(gumbel(seed, iteration, torch.tensor([index]), t, 8, stream=stream)[0].tolist()))
    assert len(seen) == 6 + math.factorial(5)


def uniform(rows=200, vocab=5000, **at):
    u = bits(at.get("seed", 0), at.get("iteration", 0), torch.arange(rows), at.get("t", 0), vocab, at.get("stream", 0))
    return u.double() / 2**31


def kolmogorov_smirnov(sample, cdf):
    x = cdf(sample.flatten().sort().values)
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return max((steps[1:] - x).max(), (x - steps[:-1]).max()).item() * math.sqrt(n)


def test_the_bits_are_uniform():
    u = uniform()
    n = u.numel()
    assert abs(u.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert abs(u.var().item() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    assert kolmogorov_smirnov(u, lambda x: x) < 1.95  # 0.1 % point
    integers = bits(0, 0, torch.arange(200), 0, 5000)
    for bit in range(31):
        ones = (integers >> bit & 1).double().mean().item()
        assert abs(ones - 0.5) < 4.5 * 0.5 / math.sqrt(n), bit


def test_the_gumbel_noise_is_gumbel():
    g = gumbel(11, 0, torch.arange(200), 0, 5000).double()
    assert g.isfinite().all()
    assert abs(g.mean().item() - 0.57721566) < 4 * math.sqrt(math.pi**2 / 6 / g.numel())
    assert abs(g.var().item() - math.pi**2 / 6) < 0.02
    assert kolmogorov_smirnov(g, lambda x: torch.exp(-torch.exp(-x))) < 1.95
    # the tail an argmax looks at: P(g > 10) = 4.54e-5, 45 of a million
    assert 20 < (g > 10).sum() < 80


def test_the_extremes_are_finite():
    bits = torch.tensor([0, 1, 2**31 - 64, 2**31 - 1], dtype=torch.int32)
    want = [-math.log(2**-32), -math.log(1.5 * 2**-31), *[-math.log(24 * math.log(2))] * 2]
    assert to_gumbel(bits).tolist() == pytest.approx(want, rel=1e-5)
    assert bits.tolist() == [0, 1, 2**31 - 64, 2**31 - 1]


def test_neighbours_are_independent():
    base = uniform()
    n = base.numel()
    others = {
        "vocabulary id": (base[:, :-1], base[:, 1:]),
        "vocabulary id + 2^k": (base[:, :-1024], base[:, 1024:]),
        "index": (base[:-1], base[1:]),
        "t": (base, uniform(t=1)),
        "iteration": (base, uniform(iteration=1)),
        "seed": (base, uniform(seed=1)),
        "stream": (base, uniform(stream=1)),
        "diagonal": (base[:-1], uniform(t=1)[1:]),
    }
    for name, (a, b) in others.items():
        a, b = a - 0.5, b - 0.5
        # correlations of the values, of their squares and of the low bits
        for f in (lambda x: x, lambda x: x.square() - 1 / 12, lambda x: (x * 2**20).frac().abs() - 0.5):
            fa, fb = f(a).flatten(), f(b).flatten()
            r = torch.corrcoef(torch.stack([fa, fb]))[0, 1].item()
            assert abs(r) < 4.5 / math.sqrt(n) * 1.1, name


def test_one_changed_input_bit_flips_half_of_the_output_bits():
    def flips(a, b):
        x = a ^ b
        return sum((x >> bit & 1).double().mean().item() for bit in range(31)) / 31

    index = torch.arange(64)
    at = bits(0, 0, index, 0, 4096)
    for k in range(0, 20, 3):
        assert abs(flips(at, bits(0, 0, index ^ (1 << k), 0, 4096)) - 0.5) < 0.005
        assert abs(flips(at, bits(0, 0, index, 1 << k, 4096)) - 0.5) < 0.005
    for k in range(12):
        assert abs(flips(at, at[:, torch.arange(4096) ^ (1 << k)]) - 0.5) < 0.005


def chi_square(counts, p):
    expected = p * counts.sum()
    return ((counts - expected).square() / expected).sum().item()


@pytest.mark.parametrize("over", ["index", "t", "iteration"])
def test_argmax_samples_the_softmax(over):
    """200,000 draws along one coordinate match the probabilities, and successive draws do not depend on each other."""
    logits = torch.tensor([2.0, 1.5, 0, -1, 0.5, -3, 1, 0])
    n = 200_000
    if over == "index":
        noise = gumbel(5, 0, torch.arange(n), 0, 8)
    elif over == "t":
        noise = gumbel(5, 0, torch.zeros(n, dtype=torch.int64), torch.arange(n), 8)
    else:
        noise = torch.cat([gumbel(5, i, torch.arange(1000), 0, 8) for i in range(n // 1000)])
    token = (logits + noise).argmax(1)
    p = logits.double().softmax(0)
    assert chi_square(token.bincount(minlength=8).double(), p) < 24.3  # 7 degrees, 0.1 % point
    pairs = (token[:-1] * 8 + token[1:]).bincount(minlength=64).double()
    assert chi_square(pairs, torch.outer(p, p).flatten()) < 103.4  # 63 degrees


def test_a_large_vocabulary_is_sampled_evenly():
    token = torch.cat([gumbel(9, 0, torch.arange(2000), t, 4096).argmax(1) for t in range(5)])
    blocks = (token // 64).bincount(minlength=64).double()
    assert chi_square(blocks, torch.full((64,), 1 / 64, dtype=torch.float64)) < 103.4
    low = (token % 64).bincount(minlength=64).double()
    assert chi_square(low, torch.full((64,), 1 / 64, dtype=torch.float64)) < 103.4


@pytest.mark.gpu
def test_cuda_draws_the_same_integers():
    index = torch.arange(300)
    keys = row_keys(base_key(1, 2), index, index)
    on_cuda = row_keys(base_key(1, 2), index.cuda(), index.cuda())
    assert torch.equal(keys, on_cuda.cpu())
    assert torch.equal(random_bits(keys, 50_257), random_bits(on_cuda, 50_257).cpu())
    assert_close(gumbel(1, 2, index.cuda(), 3, 50_257).cpu(), gumbel(1, 2, index, 3, 50_257), rtol=1e-5, atol=1e-5)
