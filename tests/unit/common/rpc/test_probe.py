from __future__ import annotations

import pytest

from common.rpc import probe


def test_a_certificate_that_cannot_be_read_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["probe", "127.0.0.1:1", "--tls-ca", "nowhere.pem"])
    with pytest.raises(SystemExit) as caught:
        probe.main()
    assert caught.value.code == 2
    assert "nowhere.pem: No such file" in capsys.readouterr().err
