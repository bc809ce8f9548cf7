"""The whole report as plain data, the same for people (text.py) and for programs (--json)."""

from __future__ import annotations

import os
from typing import Any

from hdma.errors import Error, UsageError
from hdma.info import checks, found, gpus, groups, host, job, launchers, rdma, settings
from hdma.info.checks import Check

VERDICTS = ("ok", "warn", "fail")


def make(tries: bool = False) -> dict[str, Any]:
    """Looks at this host and, with the others, at the job. Bounded in time; `verdict` is that of the worst check.

    `tries`: GPUs are used, too.
    """
    machine, limits = host.machine(), host.limits()
    # As the shell has them: joining sets a time-out.
    variables = settings.table()
    versions, verbs = host.versions(), rdma.look()
    me = job.join()
    wires, devices = [*found.wires(), rdma.wire(verbs)], gpus.look(found.devices(), tries)
    verbs = rdma.near(verbs, devices) | {"taken": [], "why": ""}
    library = found.mpi4py_library()
    # Only the mpirun that starts ranks matters, and one did already.
    mpirun = found.mpirun() if me.size == 1 else None
    ranks: list[dict[str, Any]] = []
    rows: list[Check] = []
    try:
        addresses = [gpu["pci"] for device in devices for gpu in device.get("gpus", [])]
        my_cpus = sorted(os.sched_getaffinity(0))
        card = {"offers": verbs["offers"], "reason": verbs["reason"]}
        everyone = job.gather(me, {"host": machine["name"], "cpus": my_cpus, "gpus": addresses, "rdma": card})
        here = [rank for rank in everyone if rank["host"] == machine["name"]]
        cpus = len({cpu for rank in here for cpu in rank["cpus"]})
        # Alone, for the smallest job.
        facts = checks.Facts(machine, limits, wires, devices, me.topology, len(here) if me.comm else 2, cpus)
        own_gpus = len({address for rank in here for address in rank["gpus"]})
        rows = checks.host(facts) + gpus.checks(facts, own_gpus if me.comm else None, versions["torch"])
        verbs["taken"], verbs["why"], agreed = rdma.taken(verbs, [rank["rdma"] for rank in everyone], facts, me.rank)
        rows += rdma.checks(facts, verbs) + agreed
        mine = {"host": machine["name"], "pid": os.getpid(), "checks": [check.row() for check in rows]}
        ranks = job.gather(me, mine)
        if me.comm:
            me.comm.close()
    except Error as error:
        me.error = str(error)
        ranks = [{"host": machine["name"], "pid": os.getpid(), "checks": [check.row() for check in rows]}]
    own = [_job(me)] + ([] if me.size > 1 else launchers.checks(mpirun, library, machine["cores"]))
    all_checks = _merged([check.row() for check in own], me.rank, ranks)
    return {
        "versions": versions,
        "mpi": library,
        "machine": machine,
        "limits": limits,
        "wires": wires,
        "devices": devices,
        "rdma": verbs,
        "mpirun": mpirun,
        "job": job.describe(me, ranks, "rdma" if verbs["taken"] else "tcp"),
        "groups": _groups(me),
        "variables": variables,
        "checks": all_checks,
        "verdict": max((check["verdict"] for check in all_checks), key=VERDICTS.index),
    }


def _job(me: job.Job) -> Check:
    if me.error:
        return Check("job", "fail", me.error)
    if me.comm is None:
        return Check("job", "ok", "a single process: start it with mpirun, torchrun or srun to look at a job")
    return Check("job", "ok", f"all {me.size} ranks joined ({me.launcher}) and exchanged what they found")


def _merged(own: list[dict[str, Any]], rank: int, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """This rank's checks, and of the others those that say something else than ok, once for each host."""
    mine = ranks[rank]["checks"] if len(ranks) > 1 else ranks[0]["checks"]
    merged = [{**check, "where": ""} for check in own + mine]
    host_of_mine = ranks[rank]["host"] if len(ranks) > 1 else ranks[0]["host"]
    seen = {(host_of_mine, check["name"], check["verdict"]) for check in mine}
    for number, other in enumerate(ranks):
        for check in other["checks"]:
            key = (other["host"], check["name"], check["verdict"])
            if check["verdict"] != "ok" and key not in seen:
                seen.add(key)
                merged.append({**check, "where": f"rank {number} on {other['host']}"})
    return merged


def _groups(me: job.Job) -> list[dict[str, Any]]:
    """One row for the job's grid, alone for usual ones; without those for which the variables allow no communicator."""
    rows = []
    for grid in [(me.topology.nodes, me.topology.ranks_per_node)] if me.comm else groups.GRIDS:
        try:
            rows.append(groups.group(*grid))
        except UsageError:
            pass
    return rows
