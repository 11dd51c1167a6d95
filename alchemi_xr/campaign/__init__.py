"""A stage graph over a store on Dask workers: campaigns that survive failures.

``state`` decides (pure), ``driver`` talks to Dask, ``worker`` computes one
unit, ``results`` keeps what was computed and merges it, ``report`` tells.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemi_xr.campaign.campaign import Campaign
    from alchemi_xr.campaign.report import CampaignReport, CampaignStatus, campaign_status

__all__ = ["Campaign", "CampaignReport", "CampaignStatus", "campaign_status"]

_HOMES = {
    "Campaign": "campaign",
    "CampaignReport": "report",
    "CampaignStatus": "report",
    "campaign_status": "report",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
