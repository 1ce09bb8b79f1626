"""`python -m gateway`: one gateway, or several on one port, until SIGTERM or SIGINT."""

from __future__ import annotations

import sys

from pydantic import ValidationError
from pydantic_settings import CliApp

from common.local_redis import LocalRedisError, redis_url
from common.log import setup_logging
from gateway.config import GatewaySettings
from gateway.processes import Processes
from gateway.program import run, run_one_of_several


def main() -> None:
    """Exits with 1 and one line of explanation if the settings, the files, the ports or the store are at fault."""
    try:
        settings = CliApp.run(GatewaySettings)
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][0]}: {fault['msg']}, not {fault['input']!r}" for fault in error.errors())
        sys.exit(f"gateway: {faults}")
    setup_logging(settings.log_level, settings.log_format, program="gateway")
    try:
        with redis_url(settings.redis_url or None) as url:
            if settings.processes == 1:
                run(settings, url)
            else:
                sys.exit(Processes(settings, url, run_one_of_several).run())
    except (LocalRedisError, OSError) as error:
        sys.exit(f"gateway: {error}")


if __name__ == "__main__":
    main()
