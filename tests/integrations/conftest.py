"""An MLflow server that all tests of a session share."""

from collections.abc import Iterator

import pytest

from tests.integrations.servers import Server


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("mlflow")
    with Server(tmp_path_factory.mktemp("mlflow")) as server:
        yield server
