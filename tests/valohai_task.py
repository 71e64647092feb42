"""The file by which Valohai tells the machines of a distributed task of each other."""

import json
from pathlib import Path

from valohai import distributed


def distributed_task(folder: Path, own: str = "0", ids: tuple[str, ...] = ("0", "1", "2", "3")) -> dict[str, object]:
    """Valohai's file of a task with four members, as the machine of member `own` has it."""
    members = [
        {
            "announce_time": f"2026-11-22T10:00:0{number}+00:00",
            "identity": f"i-{member}",
            "job_id": f"exec-{member}",
            "member_id": member,
            "network": {"exposed_ports": {}, "local_ips": [f"10.0.0.{10 + number}"], "public_ips": []},
        }
        for number, member in enumerate(ids)
    ]
    config = {"group_name": "task-1", "member_id": own, "required_count": len(ids)}
    task = {"config": config, "members": members, "self": members[ids.index(own)]}
    (folder / "distributed.json").write_text(json.dumps(task))
    distributed.flush_state()
    return task
