"""The choice of thread counts, on simulated machines with a clock of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginehouse_backendkit.threads import ThreadChooser, thread_counts


class Machine:
    """Runs steps: the time per step for each thread count is a function that a test may replace."""

    def __init__(self, counts: tuple[int, ...], step_s: Callable[[int, int], float]) -> None:
        self.now = 0.0
        self.step_s = step_s
        self.chooser = ThreadChooser(counts, lambda: self.now)

    def run(self, seconds: float, num_tokens: int = 1) -> list[int]:
        """Steps of one batch size for some time; the counts used."""
        end, used = self.now + seconds, []
        while self.now < end:
            threads = self.chooser.choose(num_tokens)
            took = self.step_s(threads, num_tokens)
            self.now += took
            self.chooser.record(num_tokens, threads, took)
            used.append(threads)
        return used


def alone(threads: int, num_tokens: int) -> float:
    """SmolLM2 on two idle cores, as measured: 19 and 11 ms for one sequence, 79 and 43 for eight."""
    return {(1, 1): 0.019, (2, 1): 0.011, (1, 8): 0.079, (2, 8): 0.043}[threads, num_tokens]


def disturbed(threads: int, num_tokens: int) -> float:
    """Beside one busy process, with sleeping barriers: one thread keeps its speed, two fall behind it."""
    return {(1, 1): 0.019, (2, 1): 0.029, (1, 8): 0.077, (2, 8): 0.092}[threads, num_tokens]


def cliff(threads: int, num_tokens: int) -> float:
    """Beside one busy process in a build whose barriers spin."""
    return {(1, 1): 0.019, (2, 1): 0.9, (1, 8): 0.079, (2, 8): 1.5}[threads, num_tokens]


def test_thread_counts_leave_one_core_then_halve() -> None:
    """One busy neighbour costs one core; more need larger steps."""
    assert thread_counts(1) == (1,)
    assert thread_counts(2) == (2, 1)
    assert thread_counts(16) == (16, 15, 8, 4, 2, 1)


def test_all_threads_are_used_on_an_idle_machine() -> None:
    """Trying fewer costs less than one percent."""
    machine = Machine((2, 1), alone)
    num_steps = len(machine.run(60.0))

    assert num_steps > 0.99 * 60.0 / 0.011


@pytest.mark.parametrize("busy", [disturbed, cliff])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_core_is_left_to_a_busy_neighbour(busy: Callable[[int, int], float], num_tokens: int) -> None:
    """Two slow steps, one trial, and the lower count is used for nearly all the time."""
    machine = Machine((2, 1), alone)
    machine.run(10.0, num_tokens)
    machine.step_s = busy
    machine.run(5.0, num_tokens)
    used = machine.run(60.0, num_tokens)

    assert used.count(2) <= 2 if busy is cliff else used.count(2) < 0.05 * len(used)


@pytest.mark.parametrize("busy", [disturbed, cliff])
def test_speed_comes_back_when_the_neighbour_leaves(busy: Callable[[int, int], float]) -> None:
    """Within a minute at most; at once where a failed trial costs little."""
    machine = Machine((2, 1), alone)
    machine.run(2.0)
    machine.step_s = busy
    machine.run(20.0)
    machine.step_s = alone
    machine.run(61.0 if busy is cliff else 5.0)

    assert machine.run(5.0).count(2) > 400


def test_a_neighbour_from_the_start_is_noticed() -> None:
    """Nothing is known of better times, so the lower count is tried anyway."""
    machine = Machine((2, 1), disturbed)
    machine.run(5.0)

    assert machine.run(20.0).count(1) > 1000


def test_one_slow_step_changes_nothing() -> None:
    """A hiccup is no reason to try anything."""
    machine = Machine((2, 1), alone)
    machine.run(0.5)
    machine.step_s = lambda threads, num_tokens: 0.5
    machine.chooser.record(1, machine.chooser.choose(1), 0.5)

    assert machine.chooser.choose(1) == 2


def test_growing_contexts_are_followed() -> None:
    """Steps that become slower bit by bit raise no alarm: the count in use stays the fastest."""
    machine = Machine((2, 1), alone)
    start = machine.now
    machine.step_s = lambda threads, num_tokens: alone(threads, num_tokens) * (1 + (machine.now - start) / 10)
    used = machine.run(30.0)

    assert used.count(1) < 0.02 * len(used)


def test_each_class_of_sizes_is_measured_separately() -> None:
    """Eight sequences may want two threads while one sequence wants one."""
    machine = Machine((2, 1), lambda threads, num_tokens: 0.01 * (threads if num_tokens == 1 else 3 - threads))
    for _ in range(20):
        machine.run(0.5, 1)
        machine.run(0.5, 8)

    assert machine.run(0.5, 1).count(1) > 40
    assert machine.run(0.5, 8).count(2) > 40


def test_a_fixed_count_is_never_changed() -> None:
    """What the user set holds."""
    machine = Machine((2,), cliff)

    assert set(machine.run(30.0)) == {2}


def test_large_batches_get_all_threads() -> None:
    """A trial with one thread would cost as much as it takes: hundreds of milliseconds for a prompt."""
    machine = Machine((2, 1), lambda threads, num_tokens: 0.6 / threads)

    assert set(machine.run(120.0, 90)) == {2}


def test_a_passing_disturbance_does_not_change_the_count() -> None:
    """Half a second of slow steps, whatever the count: the trial takes turns, so both are slow in it."""
    machine = Machine((2, 1), alone)
    machine.run(10.0, 8)
    machine.step_s = lambda threads, num_tokens: 1.8 * alone(threads, num_tokens)
    used = machine.run(0.5, 8)
    machine.step_s = alone
    used += machine.run(10.0, 8)

    assert used.count(1) <= 8
