"""The disk tier of the prefix cache: finished sequences as files, which survive a restart.

``state_folder`` has the file format and the folder with its size limit; ``tier`` measures the costs of saving and
loading, decides which sequences are saved, and loads them again. Files are read and written on separate threads.
"""

from __future__ import annotations

from enginehouse.engine.disk.state_folder import FolderTaken, StateFolder
from enginehouse.engine.disk.tier import DiskTier, Recall, StateRead

__all__ = ["DiskTier", "FolderTaken", "Recall", "StateFolder", "StateRead"]
