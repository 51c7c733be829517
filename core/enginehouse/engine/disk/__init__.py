"""The disk tier of the prefix cache: finished sequences as files, which survive a restart.

``state_file`` is one file, ``state_folder`` all of them and their bound, ``pace`` what saving and loading cost,
``tier`` decides what is saved, and ``recall`` brings it back. Files are read and written by threads of their own.
"""

from __future__ import annotations

from enginehouse.engine.disk.state_folder import FolderTaken, StateFolder
from enginehouse.engine.disk.tier import DiskTier, Recall, StateRead

__all__ = ["DiskTier", "FolderTaken", "Recall", "StateFolder", "StateRead"]
