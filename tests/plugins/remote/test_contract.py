"""The remote backend keeps the contracts of backends and engines, with our own server behind it."""

from __future__ import annotations

import pytest

from enginehouse.contract.backend import ModelSource
from enginehouse_remote.backend import RemoteBackend
from enginehouse_remote.options import RemoteOptions
from enginehouse_testkit.backend_contract import BackendContract, ModelUnderTest
from enginehouse_testkit.engine_contract import EngineContract
from enginehouse_testkit.server_thread import ServerThread

pytestmark = pytest.mark.remote


class TestRemote(BackendContract, EngineContract):
    exact = True
    knows_token_ids = False

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, upstream: ServerThread) -> ModelUnderTest:
        options = RemoteOptions(model="fake")
        return ModelUnderTest(backend=RemoteBackend(), source=ModelSource(upstream.url), options=options)
