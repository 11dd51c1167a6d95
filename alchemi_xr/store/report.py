"""What a look at a store found, in words."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Report"]

_MOST_NAMED = 20


@dataclass
class Report:
    """What a look at a store found.

    Parameters
    ----------
    where : str
    problems : list of str
        What is wrong with committed data.
    leftovers : list of str
        What killed writers left; the committed data is not touched by it.
    notices : list of str
        Facts worth knowing, such as another tool's edges that we put right.
    """

    where: str
    problems: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all committed data is sound."""
        return not self.problems

    @property
    def clean(self) -> bool:
        """Whether there are no leftovers either."""
        return self.ok and not self.leftovers

    def __str__(self) -> str:
        if self.clean and not self.notices:
            return f"{self.where}: sound"
        lines = [f"{self.where}: {'sound' if self.ok else f'{len(self.problems)} problems'}"]
        for title, entries in (
            ("problem", self.problems),
            ("left over", self.leftovers),
            ("note", self.notices),
        ):
            lines += [f"  {title}: {entry}" for entry in entries[:_MOST_NAMED]]
            if len(entries) > _MOST_NAMED:
                lines.append(f"  ({len(entries) - _MOST_NAMED} more of this kind)")
        return "\n".join(lines)
