"""Adds the libraries and the device code to the wheel. wheel.sh prepares them and sets the two variables."""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface[Any]):
    """Makes the wheel platform-specific."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            files, platform = os.environ["FERROGIN_WHEEL_FILES"], os.environ["FERROGIN_WHEEL_PLATFORM"]
        except KeyError:
            raise SystemExit("ferrogin: the package needs its libraries: build the wheel with `make wheel`, and install that") from None
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][files] = "ferrogin"
