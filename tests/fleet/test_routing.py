"""Which engine gets a group: hand-made scenes, and what holds for every sequence of them."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.fleet.routing import BLOCK, SPARE, Router

ONE, OTHER = "a" * (2 * BLOCK), "b" * (2 * BLOCK)
EVEN = {"x": 1.0, "y": 1.0}


def _given(router: Router, capacities: dict[str, float], samples: int, *prompts: str) -> str:
    return "".join(router.give(capacities, samples, prompt) for prompt in prompts)


def test_the_least_full_gets_it_by_capacity() -> None:
    """An engine of three times the size gets three of four groups."""
    assert _given(Router(), {"x": 3.0, "y": 1.0}, 2, *[""] * 8) == "xxxyxxxy"


def test_a_prompt_goes_where_its_beginning_is() -> None:
    router = Router()
    assert _given(router, EVEN, 1, ONE, OTHER) == "xy"
    router.take_back("x", 1)
    router.take_back("y", 1)
    assert _given(router, EVEN, 1, OTHER, ONE) == "yx", "both are idle"
    assert router.give(EVEN, 1, "a" * (BLOCK - 1)) == "x", "too short to be known"
    for _ in range(10):
        router.give(EVEN, 1)
    assert _given(router, EVEN, 1, OTHER, OTHER) == "yy"
    router.forget("y")
    router.take_back("x", 1)
    assert router.give(EVEN, 1, OTHER) == "x", "y has died since"


def test_the_longest_beginning_counts() -> None:
    router = Router()
    assert _given(router, EVEN, 4, ONE, "a" * BLOCK + "c" * BLOCK) == "xy"
    assert _given(router, EVEN, 1, "a" * BLOCK + "c" * 2 * BLOCK, "a" * 3 * BLOCK) == "yx"


def test_one_beginning_for_all_is_spread() -> None:
    """With 8 samples a group and 4 engines, none gets a quarter more than its share."""
    router = Router()
    engines = dict.fromkeys("wxyz", 1.0)
    chosen = [router.give(engines, 8, ONE) for _ in range(100)]
    assert max(chosen.count(name) for name in engines) <= 25 * (1 + SPARE) + 1
    assert all(chosen.count(name) for name in engines)


def test_a_weight_update_forgets() -> None:
    router = Router()
    assert router.give(EVEN, 1, ONE) == "x"
    router.forget()
    assert router.give(EVEN, 1, ONE) == "y"


Move = tuple[int, str, int]
PROMPTS = ["", ONE, OTHER, "a" * BLOCK + "c" * BLOCK]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    moves=st.lists(st.tuples(st.integers(1, 16), st.sampled_from(PROMPTS), st.integers(0, 3)), max_size=40),
)
def test_no_engine_is_above_its_bound(sizes: list[int], moves: list[Move]) -> None:
    """Of its share and `SPARE` more, unless it was the least full; what is held is what was given and not taken back;
    and the same moves choose the same engines."""
    capacities = {f"e{number}": float(size) for number, size in enumerate(sizes)}
    router, again = Router(), Router()
    given: list[tuple[str, int]] = []
    held = dict.fromkeys(capacities, 0)
    for samples, prompt, ended in moves:
        name = router.give(capacities, samples, prompt)
        assert again.give(capacities, samples, prompt) == name
        share = Fraction(sum(held.values()) + samples) * sizes[int(name[1:])] / sum(sizes)
        fullest_first = sorted((Fraction(held[each] + samples, int(size)), each) for each, size in capacities.items())
        least = fullest_first[0][0]
        full = Fraction(held[name] + samples, int(capacities[name]))
        assert held[name] + samples <= (1 + Fraction(SPARE)) * share or full == least
        held[name] += samples
        given.append((name, samples))
        for _ in range(min(ended, len(given))):
            done, count = given.pop(0)
            router.take_back(done, count)
            again.take_back(done, count)
            held[done] -= count
        assert {each: router.held(each) for each in capacities} == held
