"""Reads a trace line by line as steps of the specification: what each line may change, and when it may stand.

A second, small account of docs/trace.md: it knows the lines and nothing of the machines. A line that needs another line
beside it to be explained is a fault, and so is a change that no line explains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNCHANGING = {"RefusePrepare", "IgnoreStale", "IgnoreDuplicate", "Accept", "SeeManifest"}
RELEASED = "the engine released its weights"
"""The one change that comes from outside the specification."""
RUNNING_ONLY = {"Accept", "SeeManifest", "IgnoreDuplicate", "OpenApply", "StartApply", "Flush", "FailReceiver"}


@dataclass
class ReceiverTrace:
    """One life of a receiver, as its lines tell it."""

    att: int = 0
    run: str = "drained"
    """on, failed or drained."""
    fenced: int = 0
    gate: bool = False
    opened: bool = False
    started: bool = False
    may_serve: bool = False
    """Acknowledged, or a finish attempt."""
    tag: str = "none"
    requests: set[str] = field(default_factory=set)

    def take(self, action: str, attempt: int, args: Mapping[str, Any], post: Mapping[str, Any]) -> str:
        """Take the next line; a text says why it is no step."""
        tags = {self.tag}
        match action:
            case "FailReceiver" if args["reason"] == RELEASED:
                tags, self.may_serve = {"none"}, False
                self.run = "failed" if self.run == "on" else self.run
            case _ if action in RUNNING_ONLY and (attempt != self.att or self.run != "on"):
                return f"{action} of attempt {attempt} while attempt {self.att} is {self.run}"
            case "EndpointPrepare" | "StartRestore":
                if self.run != "drained" or attempt <= max(self.att, self.fenced):
                    return f"{action} of attempt {attempt} over attempt {self.att} that is {self.run}"
                restore, finish = action == "StartRestore", args.get("mode") == "finish"
                self.att, self.opened, self.started = attempt, False, False
                self.may_serve = finish or bool(args.get("proved"))
                self.run = "drained" if self.may_serve else "on"
                self.gate = self.gate and not restore and (finish or bool(post["gate"]))
                if self.tag.startswith("done"):
                    tags.add(f"clean({args['base']})")
            case "StopAndWait" if attempt == self.att:
                if self.run == "drained":
                    return f"{action} of attempt {attempt}, which is drained"
                self.run = "drained"
            case "StopAndWait":
                if attempt <= max(self.att, self.fenced):
                    return f"{action} of attempt {attempt}, which was installed or stopped before"
                self.fenced = attempt
            case "FailReceiver":
                self.run = "failed"
            case "CloseGate":
                if not self.gate or attempt != self.att:
                    return f"CloseGate of attempt {attempt}: attempt {self.att}, gate {self.gate}"
                self.gate = False
            case "OpenApply":
                if self.opened:
                    return "OpenApply twice"
                self.opened = True
            case "StartApply":
                if self.gate or self.requests or not self.opened or self.started:
                    return f"StartApply of attempt {attempt}: gate {self.gate}, opened {self.opened}, or twice"
                self.started, tags = True, {"none"}
                tags |= {str(post["tag"])} if str(post["tag"]).startswith("dirty(") else set()
            case "ApplyItem":
                if attempt != self.att or self.run == "drained" or self.gate or self.requests or not self.started:
                    return f"ApplyItem of attempt {attempt}: attempt {self.att} is {self.run}, gate {self.gate}"
            case "Flush":
                if self.gate or self.requests or not self.opened or self.may_serve:
                    return "Flush before it is quiet, or twice"
                self.may_serve = True
                tags |= {str(post["tag"])} if f",{attempt})" in str(post["tag"]) else set()
            case "OpenGate" | "FinishRestore":
                if (action == "OpenGate" and self.gate) or attempt != self.att or not self.may_serve:
                    return f"{action} of attempt {attempt}: attempt {self.att} acknowledged {self.may_serve}"
                self.gate, tags = self.gate or action == "OpenGate", {f"clean({args['version']})"}
            case "AdmitRequest":
                if not self.gate or args["request"] in self.requests:
                    return f"AdmitRequest {args['request']}: gate {self.gate}, running {self.requests}"
                self.requests.add(args["request"])
            case "FinishRequest":
                if args["request"] not in self.requests:
                    return f"FinishRequest {args['request']}, which does not run"
                self.requests.discard(args["request"])
            case _ if action not in UNCHANGING:
                return f"{action} is no action of a receiver"
        return self._compare(action, post, tags)

    def _compare(self, action: str, post: Mapping[str, Any], tags: set[str]) -> str:
        if (post["att"], post["gate"]) != (self.att, self.gate):
            return f"{action} leaves {dict(post)}, expected attempt {self.att} and gate {self.gate}"
        if post["tag"] not in tags:
            return f"{action} turns the tag {self.tag} into {post['tag']}"
        self.tag = str(post["tag"])
        return ""


@dataclass
class OwnerTrace:
    """One life of an owner, as its lines tell it."""

    items: Collection[str]
    """The tensors that a copy into the baseline goes through."""
    att: int = 0
    fenced: int = 0
    status: str = "idle"
    tracker: str = "lost"
    filling: int | None = None
    copied: set[str] = field(default_factory=set)
    frozen: str = ""

    def take(self, action: str, attempt: int, args: Mapping[str, Any], post: Mapping[str, Any]) -> str:
        """Take the next line; a text says why it is no step."""
        if action in {"EmitPayload", "EndStream", "FailOwner"} and attempt != self.att:
            return f"{action} of attempt {attempt} under attempt {self.att}"
        running = self.status in {"prepared", "streaming"}
        match action:
            case "OwnerPrepare":
                if running or self.status == "failed" or attempt <= max(self.att, self.fenced):
                    return f"{action} of attempt {attempt} over attempt {self.att} that is {self.status}"
                self.att, self.status = attempt, "prepared"
            case "EmitPayload" if running or self.status == "failed":
                self.status = "streaming" if running else self.status
            case "EndStream" if running:
                self.status = "ended"
            case "FailOwner" if running:
                self.status = "failed"
            case "StopOwner" if attempt == self.att and (running or self.status == "failed"):
                self.status = "stopped"
            case "StopOwner" if attempt > max(self.att, self.fenced):
                self.fenced = attempt
            case "BeginTransition" if self.frozen == "" and post["frozen"]:
                self.frozen = post["frozen"]
            case "EndTransition" | "DropCandidate" if self.frozen == args["candidate"]:
                self.frozen = ""
            case "UpdateBaseline" if self.filling is None and self.frozen and self.status != "streaming":
                old = "0" if self.tracker == "lost" else self.tracker[len("at(") : -1]
                self.tracker, self.filling, self.copied = f"updating({old})", args["version"], set()
            case "RebuildBaseline" if self.filling is None and self.frozen == "" and self.tracker == "lost":
                self.filling, self.copied = args["version"], set()
            case "CopyItem" if self.filling is not None and args["name"] not in self.copied:
                self.copied.add(args["name"])
            case "BaselineFilled" if self.filling is not None and self.copied == set(self.items):
                self.tracker, self.filling = f"at({self.filling})", None
            case "LoseBaseline" if self.tracker != "lost" or self.filling is not None:
                self.tracker, self.filling = "lost", None
            case "RefusePrepare" | "IgnoreStale":
                pass
            case _:
                return f"{action} of attempt {attempt} is no step of {self}"
        left = {"att": self.att, "tracker": self.tracker, "frozen": self.frozen}
        return "" if dict(post) == left else f"{action} leaves {dict(post)}, expected {left}"


def step_faults(lines: Iterable[tuple[str, Any]], items: Mapping[str, Collection[str]]) -> list[str]:
    """Lines of receivers and owners that are no step; `items` holds the tensors of each owner by its node's name."""
    faults: list[str] = []
    views: dict[str, ReceiverTrace | OwnerTrace] = {}
    for number, (node, line) in enumerate(lines):
        action = str(line.action)
        if action == "StartReceiver":
            views[node] = ReceiverTrace()
        elif action == "StartOwner":
            views[node] = OwnerTrace(items[node], tracker=line.post["tracker"], frozen=line.post["frozen"])
        elif node in views and (fault := views[node].take(action, line.attempt, line.args, line.post)):
            faults.append(f"line {number}, {node}: {fault}")
    return faults
