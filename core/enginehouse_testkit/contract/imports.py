"""Packages imported by an object: every start of the server and of a worker pays for them."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys

__all__ = ["packages_imported_by"]

_SCRIPT = """
import base64, pickle, sys
import enginehouse.engine.loop, enginehouse.plugins
import enginehouse_backendkit.model_folder, enginehouse_backendkit.slot_table
known = {name.partition(".")[0] for name in sys.modules}
subject, source = pickle.loads(base64.b64decode(sys.argv[1]))
exec(sys.argv[2])
own = type(subject).__module__.partition(".")[0]
new = {name.partition(".")[0] for name in sys.modules} - known - {own} - set(sys.stdlib_module_names)
print(" ".join(sorted(new)))
"""


def packages_imported_by(subject: object, source: object, action: str) -> set[str]:
    """Return the packages that ``subject``'s module and ``action`` import, beyond those of core.

    Args:
        subject: an object of a plugin; rebuilt in a separate process, so its class must be importable.
        source: a second object that ``action`` may use.
        action: Python text that uses ``subject`` and ``source``.
    """
    sent = base64.b64encode(pickle.dumps((subject, source))).decode()
    done = subprocess.run([sys.executable, "-c", _SCRIPT, sent, action], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
