"""The ledger against a naive one: every charge is counted while it lasts and freed once."""

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dataplane.core.cluster import Instance
from dataplane.core.ledger import Ledger
from tests.unit.core.builders import instance

IDS = st.sampled_from([f"r{i}" for i in range(8)])
SLOTS = st.integers(0, 3)


@dataclass
class Naive:
    """What one request is charged, written down plainly."""

    prompt: int
    prefill: tuple[str, str] | None = None
    decode: tuple[str, str] | None = None
    generated: int = 0
    remaining: float = 0.0


class LedgerMachine(RuleBasedStateMachine):
    """Charges, moves and frees at random; the sums must always be those of a plain list."""

    @initialize()
    def start(self) -> None:
        """Begin with four engines."""
        self.ledger = Ledger()
        self.naive: dict[str, Naive] = {}
        self.engines: list[Instance] = [instance(f"d{i}") for i in range(4)]
        self.ledger.reseat(self.engines)

    def _key(self, slot: int) -> tuple[str, str]:
        engine = self.engines[slot % len(self.engines)]
        return engine.instance_id, engine.epoch

    @rule(name=IDS, slot=SLOTS, prompt=st.integers(1, 500))
    def charge_prefill(self, name: str, slot: int, prompt: int) -> None:
        """Charge a prompt; a request has one prefill charge at most."""
        entry = self.naive.setdefault(name, Naive(prompt))
        entry.prefill = self._key(slot)
        self.ledger.charge_prefill(name, slot % len(self.engines), prompt)

    @rule(name=IDS, slot=SLOTS, prompt=st.integers(1, 500), rest=st.floats(1.0, 900.0))
    def charge_decode(self, name: str, slot: int, prompt: int, rest: float) -> None:
        """Charge a generation; a request has one decode charge at most."""
        entry = self.naive.setdefault(name, Naive(prompt))
        entry.decode, entry.remaining = self._key(slot), rest
        self.ledger.charge_decode(name, slot % len(self.engines), prompt, rest)

    @rule(name=IDS)
    def finish_prefill(self, name: str) -> None:
        """Free the prefill charge."""
        if name in self.naive:
            self.naive[name].prefill = None
        self.ledger.finish_prefill(name)

    @rule(name=IDS, tokens=st.integers(1, 40), rest=st.floats(1.0, 900.0))
    def stream(self, name: str, tokens: int, rest: float) -> None:
        """Move a generation on."""
        if name in self.naive:
            self.naive[name].generated += tokens
            self.naive[name].remaining = rest
        self.ledger.stream(name, tokens, rest)

    @rule(name=IDS)
    def close(self, name: str) -> None:
        """Free everything; the second time there is nothing."""
        assert self.ledger.close(name) == (self.naive.pop(name, None) is not None)
        assert not self.ledger.close(name)

    @precondition(lambda self: len(self.engines) > 1)
    @rule(slot=SLOTS)
    def lose(self, slot: int) -> None:
        """Lose an engine: what it was charged is gone."""
        gone = self.engines.pop(slot % len(self.engines))
        self._drop((gone.instance_id, gone.epoch))
        self.ledger.reseat(self.engines)

    @rule(slot=SLOTS)
    def restart(self, slot: int) -> None:
        """Restart an engine: the new boot inherits nothing."""
        place = slot % len(self.engines)
        engine = self.engines[place]
        self._drop((engine.instance_id, engine.epoch))
        self.engines[place] = replace(engine, epoch=engine.epoch + "+")
        self.ledger.reseat(self.engines)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        """Take a roster in another order: charges follow their engines."""
        self.engines = list(data.draw(st.permutations(self.engines)))
        self.ledger.reseat(self.engines)

    def _drop(self, key: tuple[str, str]) -> None:
        for entry in self.naive.values():
            entry.prefill = None if entry.prefill == key else entry.prefill
            entry.decode = None if entry.decode == key else entry.decode

    @invariant()
    def the_sums_are_right(self) -> None:
        """Every column holds what a plain sum over all requests gives."""
        columns = self.ledger.columns
        for slot, engine in enumerate(self.engines):
            key = (engine.instance_id, engine.epoch)
            prefill = [n for n in self.naive.values() if n.prefill == key]
            decode = [n for n in self.naive.values() if n.decode == key]
            assert columns.prefill_requests[slot] == len(prefill)
            assert columns.prefill_tokens[slot] == sum(n.prompt for n in prefill)
            assert columns.decode_requests[slot] == len(decode)
            assert columns.decode_kv_tokens[slot] == sum(n.prompt + n.generated for n in decode)
            rest = sum(n.remaining for n in decode)
            assert abs(columns.decode_remaining_tokens[slot] - rest) < 1e-6 * max(1.0, rest)
        assert set(self.ledger.request_ids()) == set(self.naive)
        assert len(self.ledger) == len(self.naive)
        for name, entry in self.naive.items():
            assert name in self.ledger
            assert self.ledger.generated_tokens(name) == entry.generated


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_an_idle_engine_owes_nothing() -> None:
    """Sums of fractions do not leave a trace of rounding once an engine is idle."""
    ledger = Ledger()
    ledger.reseat([instance("d0")])
    for i in range(50):
        ledger.charge_decode(f"r{i}", 0, 10, 0.1 * i + 0.3)
    for i in range(50):
        ledger.close(f"r{i}")

    assert ledger.columns.decode_remaining_tokens[0] == 0.0


def test_unknown_requests_are_ignored() -> None:
    """News of requests that were never charged, or are gone, change nothing."""
    ledger = Ledger()
    ledger.reseat([instance("d0")])
    ledger.finish_prefill("x")
    ledger.stream("x", 3, 5.0)

    assert not ledger.close("x")
    assert ledger.generated_tokens("x") == 0
    assert "0 in flight over 1" in repr(ledger)
