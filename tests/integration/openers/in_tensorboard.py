"""``in_tensorboard.py DIRECTORY``: what TensorBoard's PyTorch plugin shows of a run, as JSON."""

import json
import sys
import tempfile

from torch_tb_profiler import io
from torch_tb_profiler.profiler.loader import RunLoader


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        run = RunLoader("run", sys.argv[1], io.Cache(cache)).load()
    found = {"views": sorted(view.display_name for view in run.views), "steps": {}, "collectives": {}}
    for profile in run.get_profiles():
        if profile.worker == "All":
            for worker, table in profile.comm_ops["data"].items():
                found["collectives"][worker] = {row[0]: row[1] for row in table["rows"]}
        else:
            found["steps"][profile.worker] = [int(row[0]) for row in profile.overview["steps"]["rows"]]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
