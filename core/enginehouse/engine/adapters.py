"""Adapters loaded by a runner: loads them between steps, counts their uses, and unloads the least recently used one.

Used by the scheduler on the engine thread: a sequence takes its adapters when it starts and gives them back when it
leaves the runner. Entries of the prefix cache need no loaded adapter.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from attrs import define
from numpy.typing import NDArray

from enginehouse.contract.adapters import Adapter, AdapterKeeper, AdapterSet, digest_of
from enginehouse.contract.backend import Runner
from enginehouse.contract.errors import AdapterRefused, PluginFailed, quoted

__all__ = ["LoadedAdapters"]

_log = logging.getLogger(__name__)


@define
class _Loaded:
    """A loaded adapter. ``is_leaving``: it was removed, and is unloaded with its last use."""

    handle: int
    num_uses: int = 0
    is_leaving: bool = False


class LoadedAdapters:
    """The adapters of one runner, by the hash of their files.

    Args:
        runner: loads them if it is an :class:`enginehouse.contract.adapters.AdapterKeeper`.
        max_adapters: number that may be loaded at once.
    """

    def __init__(self, runner: Runner, max_adapters: int) -> None:
        self._keeper: AdapterKeeper | None = None
        if runner.capabilities.adapters != "none" and isinstance(runner, AdapterKeeper):
            self._keeper = runner
        self._max = max_adapters
        self._loaded: dict[str, _Loaded] = {}  # least recently used first
        self._invocations: dict[str, tuple[int, ...]] = {}  # of adapters that were loaded: files with the right hash

    def __len__(self) -> int:
        return len(self._loaded)

    def load(self, adapter: Adapter) -> bool:
        """Load an adapter if it is not; returns False if all places are taken by adapters in use.

        Raises:
            AdapterRefused: the model takes none, or the files are damaged, do not fit or have changed.
        """
        known = self._loaded.pop(adapter.digest, None)
        if known is not None:
            known.is_leaving = False
            self._loaded[adapter.digest] = known
            return True
        if self._keeper is None:
            raise AdapterRefused("this model takes no adapters", "adapters")
        if len(self._loaded) >= self._max and not self._unload_one():
            return False
        path = Path(adapter.path)
        with _naming(adapter):
            try:
                found = digest_of(path)
            except OSError as error:
                raise AdapterRefused(f"{path.name} cannot be read: {error.strerror}", "adapters") from error
            if found != adapter.digest:
                reason = "its files have changed since it was added; remove it and add it again"
                raise AdapterRefused(reason, "adapters")
            handle = self._keeper.load_adapter(path)
            self._invocations[adapter.digest] = self._keeper.invocation_tokens(path)
        self._loaded[adapter.digest] = _Loaded(handle)
        _log.info("loaded the adapter %s", adapter.name)
        return True

    def activation(self, adapters: tuple[Adapter, ...], prompt: NDArray[np.int32]) -> int:
        """Return the position in a prompt from which adapters act: 0, but for activated ones (aLoRA).

        Args:
            prompt: (num_tokens,).

        Raises:
            AdapterRefused: the files are damaged; or an activated adapter is not alone, or the prompt lacks its tokens.
        """
        for adapter in adapters:
            with _naming(adapter):
                invocation = self._invocation(adapter)
                if invocation and len(adapters) > 1:
                    raise AdapterRefused("an activated LoRA (aLoRA) takes no other adapters beside it", "adapters")
                if invocation:
                    return _last_occurrence(prompt, invocation)
        return 0

    def _invocation(self, adapter: Adapter) -> tuple[int, ...]:
        known = self._invocations.get(adapter.digest)
        if known is None and self._keeper is not None:
            return self._keeper.invocation_tokens(Path(adapter.path))
        return known or ()

    def take(self, adapters: tuple[Adapter, ...]) -> AdapterSet | None:
        """Use adapters for a sequence, loading them if necessary; None if that needs places of adapters in use.

        Raises:
            AdapterRefused: as :meth:`load`, or there are more adapters than places.
        """
        if not adapters:
            return ()
        if len(adapters) > self._max:
            raise AdapterRefused(f"{len(adapters)} adapters were asked for; max_adapters is {self._max}", "adapters")
        taken: list[Adapter] = []
        try:
            for adapter in adapters:
                if not self.load(adapter):
                    return None
                self._loaded[adapter.digest].num_uses += 1  # so that the next one does not unload it
                taken.append(adapter)
            return tuple((self._loaded[one.digest].handle, one.scale) for one in adapters)
        finally:
            if len(taken) < len(adapters):
                self.give_back(taken)

    def give_back(self, adapters: Iterable[Adapter]) -> None:
        """End one use of each adapter; one that was removed is unloaded after its last."""
        for adapter in adapters:
            loaded = self._loaded[adapter.digest]
            loaded.num_uses -= 1
            if loaded.is_leaving and not loaded.num_uses:
                self._unload(adapter.digest)

    def remove(self, digest: str) -> None:
        """Unload an adapter, or let it leave with its last use; unknown ones are ignored."""
        loaded = self._loaded.get(digest)
        if loaded is None:
            return
        loaded.is_leaving = True
        if not loaded.num_uses:
            self._unload(digest)

    def _unload_one(self) -> bool:
        """Unload the least recently used adapter that no sequence uses; returns False if there is none."""
        idle = next((digest for digest, loaded in self._loaded.items() if not loaded.num_uses), None)
        if idle is None:
            return False
        self._unload(idle)
        return True

    def _unload(self, digest: str) -> None:
        assert self._keeper is not None
        with contextlib.suppress(PluginFailed):  # its guard has logged it; the place is free all the same
            self._keeper.unload_adapter(self._loaded.pop(digest).handle)


@contextlib.contextmanager
def _naming(adapter: Adapter) -> Iterator[None]:
    """Name the adapter in refusals."""
    try:
        yield
    except AdapterRefused as error:
        message = f"The adapter {quoted(adapter.name)}: {error.message.removesuffix('.')}."
        raise AdapterRefused(message, "adapters") from error


def _last_occurrence(prompt: NDArray[np.int32], invocation: tuple[int, ...]) -> int:
    places = np.arange(len(prompt) - len(invocation) + 1)
    for offset, token_id in enumerate(invocation):
        places = places[prompt[places + offset] == token_id]
    if len(places):
        return int(places[-1])
    shown = ", ".join(map(str, invocation[:8])) + (", ..." if len(invocation) > 8 else "")
    reason = f"it is an activated LoRA (aLoRA), and the prompt does not have its invocation tokens ({shown})"
    raise AdapterRefused(reason, "adapters")
