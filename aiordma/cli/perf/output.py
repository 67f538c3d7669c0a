"""Where the figures go: perftest's lines for people, and a JSON document for programs."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

from aiordma.cli.output import printable
from aiordma.cli.perf.options import Plan
from aiordma.cli.perf.report import bw_row, header, lat_row
from aiordma.cli.version import aiordma_version

__all__ = ["Printer"]

_RULE = "-" * 135
_TITLES = {"lat": "Latency", "bw": "BW", "rate": "Message Rate"}


class Printer:
    """Prints one test.

    Args:
        plan: The measurement.
        gbits: Bandwidth in Gb/s.
        unsorted: Print every sample of a latency test, and put it into the JSON.
        json_path: Where the JSON goes; "-" is standard output, alone; None for no JSON.
    """

    def __init__(self, plan: Plan, *, gbits: bool, unsorted: bool, json_path: str | None) -> None:
        self.plan = plan
        self.gbits = gbits
        self._unsorted = unsorted
        self._json_path = json_path
        self._info: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []

    def begin(self, facts: dict[str, Any]) -> None:
        """Note that the test begins; `facts` describe both ends."""
        plan = self.plan
        self._info = {
            "test": plan.test,
            "metric": plan.metric,
            "api": plan.api,
            "wait": plan.wait,
            "qps": plan.qps,
            "tx_depth": plan.tx_depth,
            "rx_depth": plan.rx_depth,
            "post_list": plan.post_list,
            "duration_s": plan.duration_s,
            "warm_up": plan.warm_up,
            **facts,
            "python": platform.python_version(),
            "aiordma": aiordma_version(),
            "kernel": platform.release(),
        }
        if plan.metric == "lat":
            self._info["latency_of"] = "half round trip" if plan.is_half else "whole operation"
        else:
            self._info["bw_unit"] = "Gb/sec" if self.gbits else "MiB/sec"
        if self._json_path == "-":
            return
        info = self._info
        print(_RULE)
        print(f"{'':20}{plan.test.capitalize()} {_TITLES[plan.metric]} Test")
        device = printable(info["device"])
        print(f" Device         : {device:<20} Transport type : {info['transport']}")
        print(f" Number of qps  : {plan.qps:<20} TX depth       : {plan.tx_depth}")
        print(f" API            : {plan.api:<20} Post list      : {plan.post_list}")
        print(f" Event loop     : {info['loop']:<20} Wait           : {plan.wait}")
        if plan.metric == "lat":
            print(f" Latency of     : {info['latency_of']}")
        print(_RULE)
        print(header(plan, gbits=self.gbits), flush=True)

    def row(self, figures: dict[str, Any]) -> None:
        """The figures of one size."""
        samples = figures.pop("samples_ns", None)
        if self._unsorted and samples is not None:
            figures["samples_ns"] = samples
        self._rows.append(figures)
        if self._json_path == "-":
            return
        print(lat_row(figures) if self.plan.metric == "lat" else bw_row(figures), flush=True)
        if self._unsorted and samples is not None:
            print("#, usec")
            for number, sample in enumerate(samples, 1):
                print(f"{number}, {sample / 1000:.3f}")

    def end(self) -> None:
        """The test has ended well."""
        document = json.dumps({"test_info": self._info, "results": self._rows}, indent=2)
        if self._json_path == "-":
            print(document)
            return
        print(_RULE)
        if self._json_path is not None:
            Path(self._json_path).write_text(document + "\n")
