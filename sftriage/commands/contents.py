"""What there is to run: each subcommand's name, where it is written, what a list says of it, and how it is used.

A command's module is imported when the command is run or asked for its help, and not to show that it is there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Entry:
    """A subcommand.

    Attributes:
        name: as it is typed.
        home: its module in `sftriage.commands`, and its function there.
        summary: a line in a list of commands.
        examples: at the end of its own help.
    """

    name: str
    home: str
    summary: str
    examples: tuple[str, ...] = ()

    @property
    def passes_on(self) -> bool:
        """Whether options after its first argument are not its own."""
        return self.home == "run:run"


@dataclass(frozen=True, slots=True)
class Section:
    """Subcommands that go by a common name."""

    name: str
    summary: str
    entries: tuple[Entry, ...]


def _entries(text: str) -> tuple[Entry, ...]:
    """Each by a line with its name, home and summary, and a line an example, set in."""
    entries: list[Entry] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            entries[-1] = replace(entries[-1], examples=(*entries[-1].examples, line.strip()))
        else:
            name, home, summary = line.split(maxsplit=2)
            entries.append(Entry(name, home, summary))
    return tuple(entries)


_COMMANDS = """
run        run:run                  Run a training job and watch it.
    sftriage run -- torchrun --nproc-per-node 8 train.py
    sftriage run --policy mine.yaml --store s3://our-traces -- torchrun train.py
    sftriage run --job-id 1234 --hub node-1 -- torchrun --nnodes 4 train.py
attach     run:attach               Take over a job whose `sftriage run` has ended.
    sftriage attach --run sftriage-runs/RUN
agent      agent:agent              Watch one host of a job on many.
    sftriage agent --job-id 1234 --hub node-1 --rings /dev/shm/my-rings
controller controller:controller    Watch a job on many hosts.
    sftriage controller --job-id 1234 --nats nats://nats:4222 --creds FILE
    sftriage controller --run sftriage-runs/1234 --hub node-1
operator   kube:operate             Look after the policies and captures of a Kubernetes cluster.
    sftriage operator --store s3://our-traces
    sftriage operator -n training
demo       demo:demo                Train a small model, slow one rank, and find it.
    sftriage demo
    sftriage demo --fault forward:2:60 --steps 600
    sftriage demo --fault none
analyze    analyze:analyze          Say where the time of a recording went.
    sftriage analyze sftriage-runs/RUN
    sftriage analyze durations.npz --window 20 --json
whatif     whatif:whatif            Say what a job would run at without stragglers.
    sftriage whatif sftriage-runs/RUN
    sftriage whatif trace.parquet --json
    sftriage whatif rank*.json.gz
advise     advise:advise            Say what would help against a straggler that stays.
    sftriage advise
    sftriage advise sftriage-runs/RUN --gradients 500Mi --bandwidth 12.5 --json
reduce     reduce:reduce            Reduce heavy traces to stages, and say what they show.
    sftriage reduce rank*.json.gz
    sftriage reduce trace.json.gz --against sftriage-runs/RUN
decisions  decisions:decisions      List what was decided about each window, and why.
    sftriage decisions
    sftriage decisions --run sftriage-runs/RUN --json
capture    capture:capture          Capture ranks of a running job, on demand.
    sftriage capture --rank 3 --reason "loss spikes"
    sftriage capture --rank 3 --rank 4 --steps 2 --reason "slow"
evidence   evidence:evidence        Ask the NVIDIA driver about the GPUs of a job.
    sftriage evidence
    sftriage evidence --run sftriage-runs/RUN --json
doctor     doctor:doctor            Say what works on this machine.
    sftriage doctor
    sftriage doctor --json
explain    explain:explain_decision Say why a window was decided as it was.
    sftriage explain 1042
    sftriage explain 1000-1049
    sftriage explain w1000-1049-r3-slow-rank-1
report     report:report            Write a report of a run or a capture, to hand on.
    sftriage report -o report.html
    sftriage report sftriage-runs/RUN --format md
    sftriage report w1000 -o capture.html
ui         ui:ui                    Show a run or a store as a web page.
    sftriage ui
    sftriage ui --run sftriage-runs/RUN --port 8000
    sftriage ui --host 0.0.0.0 --token-file TOKEN --allow-host gpu1.example
watch      watch:watch              Watch a job live in the terminal.
    sftriage watch
    sftriage watch --run sftriage-runs/RUN --once
mcp        mcp:mcp                  Answer an assistant's questions about runs.
    sftriage mcp --runs sftriage-runs
    sftriage mcp --runs sftriage-runs --store s3://our-traces
"""

_TRACES = """
list     traces:list_traces          List captures, oldest first.
    sftriage traces list
    sftriage traces list --stage data --since 2h
    sftriage traces list --step 1000..1100 --reproduced yes --json
    sftriage traces list --store s3://our-traces/pretraining --job train
for-step traces:traces_for_step      Find the captures of a step, or why there is none.
    sftriage traces for-step 1042
    sftriage traces for-step 1042 --run sftriage-runs/RUN --json
show     traces:show_trace           Show why a capture was made and what it holds.
    sftriage traces show w1000
    sftriage traces show train/RUN/w1000-1049-r3-slow-rank-1 --store URL
get      traces:get_trace            Copy a capture's trace to a file, verified.
    sftriage traces get w1000
    sftriage traces get w1000 --all --out traces/
open     opening:open_trace          Open a capture's trace in Perfetto's viewer.
    sftriage traces open w1000
    sftriage traces open w1000 --offline
    sftriage traces open w1000 --no-browser     # over SSH: print the link
pin      retention:pin_trace         Keep a capture, whatever retention says.
    sftriage traces pin w1000
unpin    retention:unpin_trace       Leave a capture to retention again.
    sftriage traces unpin w1000
prune    retention:prune_traces      Remove old captures, or those that are damaged.
    sftriage traces prune --age 14d --bytes 50Gi --dry-run
    sftriage traces prune --age 14d --bytes 50Gi
    sftriage traces prune --damaged
reindex  retention:reindex_traces    Build the catalogue again from the manifests.
    sftriage traces reindex
    sftriage traces reindex --store s3://our-traces/pretraining
upload   traces_upload:upload_traces Upload captures to a store, or finish doing so.
    sftriage traces upload
    sftriage traces upload --run DIR --store s3://our-traces/pretraining
schema   traces:show_schema          Print the JSON Schema of a manifest.
    sftriage traces schema > manifest.schema.json
"""

_POLICY = """
validate policy:validate      Check policies, and show every mistake.
    sftriage policy validate mine.yaml
    sftriage policy validate default mine.yaml --json
show     policy:show          Print a policy with its defaults filled in.
    sftriage policy show default
schema   policy:schema        Print the JSON Schema of a policy.
    sftriage policy schema > policy.schema.json
list     policy:list_policies List the policies that ship with sftriage.
    sftriage policy list
test     policy:try_out       Replay a policy over a recording.
    sftriage policy test mine.yaml --on sftriage-runs/RUN
    sftriage policy test mine.yaml --on sftriage-runs/RUN --expect expected.txt
"""

_KUBE = """
status     kube_jobs:status           List the jobs of a cluster, and say how they stand.
    sftriage kube status -n training
    sftriage kube status -A --json
traces     kube_jobs:traces           Say which steps of a job were slow, and list their traces.
    sftriage kube traces pretraining -n training
    sftriage kube traces pretraining --step 1042
get        kube_jobs:get              Fetch a trace to this machine, verified.
    sftriage kube get look-x8z2k -n training
    sftriage kube get --job pretraining --step 1042 --out traces/
open       kube_jobs:open_trace       Open a trace in Perfetto's viewer.
    sftriage kube open look-x8z2k -n training
    sftriage kube open --job pretraining
capture    kube_capture:capture       Capture a rank of a job in a cluster, on demand.
    sftriage kube capture resnet --rank 3 --reason "loss spikes"
    sftriage kube capture resnet --rank 3 --reason "slow" --no-wait
doctor     kube_doctor:doctor         Find out why nothing happens, and what to do.
    sftriage kube doctor -n training
    sftriage kube doctor -n training --json
controller kube_controller:controller Watch one job of a cluster: what the operator starts.
    sftriage kube controller --job-id ml/job/a --policies p --run r --creds hub
policy     kube:policies              List a cluster's policies, and say whether they are in force.
    sftriage kube policy -n training
    sftriage kube policy -A --json
crds       kube:definitions           Print the custom resource definitions.
    sftriage kube crds > crds.yaml
inject     kube_inject:inject         Print a job with its pods as the webhook would have them.
    sftriage kube inject -f job.yaml > watched.yaml
    sftriage kube inject -n training --settings settings.yaml -f job.yaml
carry      kube_inject:carry          Copy what trainers need into a volume (injected pods run it).
    sftriage kube carry /sftriage --spool /sftriage-spool/spool
"""

_WEBHOOK = """
serve        webhook:serve        Answer an API server's reviews of new pods and captures.
    sftriage webhook serve --cert /certs --settings settings.yaml
certificates webhook:certificates Make its certificate, and have the API server trust it.
    sftriage webhook certificates
    sftriage webhook certificates -n sftriage-system
"""

CONTENTS: tuple[Entry | Section, ...] = (
    *_entries(_COMMANDS),
    Section("traces", "Find, look at and fetch the traces that were captured.", _entries(_TRACES)),
    Section("policy", "Check policies, try them on recordings, list those there are.", _entries(_POLICY)),
    Section("kube", "Jobs, captures and policies in a Kubernetes cluster.", _entries(_KUBE)),
    Section("webhook", "Have training pods of a Kubernetes cluster watched.", _entries(_WEBHOOK)),
)
