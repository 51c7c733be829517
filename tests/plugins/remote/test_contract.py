"""The contract of backends, for the remote one over our own server.

The contract of engines looks at token ids, which stay with the server that has the vocabulary; what it promises is
checked from outside instead, see ``test_behaviours``.
"""

from __future__ import annotations

import pytest

from enginehouse.backend import ModelSource
from enginehouse.testing.backend_contract import BackendContract, ModelUnderTest
from enginehouse.testing.server_thread import ServerThread
from enginehouse_remote.backend import RemoteBackend
from enginehouse_remote.options import RemoteOptions

pytestmark = pytest.mark.remote


class TestRemote(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, upstream: ServerThread) -> ModelUnderTest:
        return ModelUnderTest(
            backend=RemoteBackend(), source=ModelSource(upstream.url), options=RemoteOptions(model="fake")
        )
