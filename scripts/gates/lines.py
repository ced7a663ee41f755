"""Lines of src, all of it: a package is moved and renamed without growing.

The count is of every line of the `.py` and `.pyi` files. More lines than the table allows are an
argument to be made in this table, in the commit that needs them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gates.source import Problem
from workspace import Package

# The lines of each package when its files still lay in one folder; together at most LINES.
LINES_BEFORE = {
    "comm-collectives": 21_186,
    "gpu-alloc": 2_512,
    "mesh-spmd": 1_060,
    "moe-pipeline": 13_034,
    "moe-train": 7_588,
    "unified-ckpt": 11_017,
    "weight-convert": 2_166,
}
LINES = sum(LINES_BEFORE.values())  # 58,563

# What a capability that did not exist before may add, and which one; less what has gone since.
LINES_ADDED = {
    # All of torch's collectives and transfers as drop-ins, where five were, with torch's Work, and
    # what puts them in torch's place; Parameters, sets, enums and more in nested values; plans of
    # any number of nodes; graph breaks. Less what frames over own streams have made needless:
    # mailboxes, pages, three ways of small messages, gloo's transfers between two ranks; threads,
    # handles and arithmetic of the shared-memory backend beside those of all calls.
    # Circles of transfers found and named on all ranks; a simulation that carries transfers, and a
    # fuzzer that makes them. Transfers of devices in one order of both ranks; one device for all
    # threads of a rank.
    # Who holds up a device (NCCL): what hosts tell each other of it, verdicts, aborts; CUDA graphs.
    # Frames that peers send alike are read once; frames in the simulator break between two bytes.
    # What the hosts of silent devices wait for, and who does not answer, in the others' errors.
    # Gradients summed elsewhere, reduced beside the backward; indexes kept for other streams.
    # One rank without the others. A send that is refused while it goes away. Programs of torch's
    # collectives, run by a command. Frames that leave at once for all ranks; pieces of memory.
    # Circles of waits over groups, calls among them, told along the waits; the fuzzer makes them.
    # Less the command `bench`, which a benchmark does. What torch's flight recorder saw not end.
    # Places of messages as they are when they are asked for, questions that are taken back late,
    # marks of threads, a store that hangs, memory that is short.
    # Of word to a peer that never reads the last alone; counters that end with their graphs.
    # Backwards that fail ahead of our nodes; torch's coalescing; calls in callbacks; roots of
    # reductions and shapes of sparse ones; names that mean loopback.
    # The matrix on devices. Failures of the simulation itself.
    # Tensors without memory or inside transforms, and forked children, which ended or misled ranks.
    # Wrong lists, limits, gradients and slots refused by name; calls of torch's own programs.
    # Programs whose calls go elsewhere, told; modules that are missing; tensors that share memory.
    "comm-collectives": 1_105 + 370 - 240 + 46 + 205 + 40 + 153 + 40 + 5 + 230 + 45,
    # Data people have (readers, chat, mixtures, packing, ledger), tokenizers of checkpoints, fine-
    # tuning, evaluation, generation and chat on several ranks, and what may change on resume.
    # States on the nodes between checkpoints; checkpoints of a run in a store.
    # Muon, WSD and groups of parameters. The comparison of a job's layouts.
    # Saves beside training, at once or in pieces, and a moving average.
    # Another layout while a job runs, by schedule and by request.
    # The libraries' depth as keys: ways of tokens, forms of recompute, formats of numbers.
    # Weights in any format of a family to begin with, and to write.
    # Pipelines: stages on a rank, planned schedules, layers split by work, a step as a picture.
    # Choices of experts in files.
    # Uneven experts: as keys, by the rows that experts have got, in what a checkpoint says.
    # Whose failure was the job's first, and which ranks give no sign of life.
    # Saves beside training, and the average, over changes of the layout.
    # Sums beside the backward; keys that change numbers, compared; DeepEP as a key; bytes planned.
    # Moments, master weights, gradients and parameters that ranks share out.
    # Memory forecast of each rank alone. Signs of life of thousands of ranks.
    # Who serves a rank's memory, its record, and what is told when there is none left.
    # Moments of one byte in checkpoints.
    # The decoder of a model of text and images.
    # Samples whose positions ranks share out: attention over exchanged heads, and over keys that go
    # around, as keys. Schedules of counted work.
    # Tensor and sequence parallelism: groups, layers, boxes of parameters, bytes planned. Embedding
    # and head of which ranks have rows, and the loss of both.
    # Experts of which ranks have parts: axes and groups of their own, boxes of halves, bytes
    # planned, refusals. Ranks that one process has forked, without importing torch in each.
    # The bytes that a step sends, beside the plan's; how often NCCL's calls are compared. Masks
    # made once for all layers.
    # Moments and master weights in the host's memory, which visit the device in two buffers;
    # parameters in pieces. Keys without effect, told; any job compared in float32.
    # Hooks that let go of a model. States of nodes in a resume by command; decoder and corpus that
    # changes of layout keep; the job's own clock, from the command on; mixtures that are gone on
    # with; keys without effect, told. Data without a target, figures of no token, indexes of files
    # that change, halves of characters.
    # Jobs that finish as they are stopped, full disks at the end of one, metrics of another run,
    # checkpoints of later steps than a resume's; ranks that do not meet.
    # Masks of token rows, files of jobs that share a cache, file systems without locks, processes
    # that prepare a corpus; frozen groups and ways of rows without ranks, told. Labels and padding
    # of token rows, which were not read.
    "moe-train": 14_085
    + 90
    + 200
    + 480
    + 180
    + 620
    + 330
    + 280
    + 130
    + 575
    + 95
    + 420
    + 70
    + 80
    + 1_010
    + 580
    + 240
    + 240
    + 150
    + 700
    + 72
    + 95
    + 230
    + 120,
    # Recording of CuPy, torch and whole scripts, torch's snapshots read and written, memory that is
    # bound to streams block by block; the recorder came from moe-train. Explain, tune, compare,
    # plot and info, as functions and commands; settings in files. Reuse that waits for events.
    # The compiled core as Python sees it: building, binding, callbacks, the allocator on it; torch
    # served from it in two ways, with its statistics; traces as numbers that it runs.
    # CuPy on the compiled core, on torch's memory and in torch's cache. Pages mapped behind address
    # space: two sources, page tables, the driver's functions.
    # Lifetime plans: packed from a recorded step, followed by both cores, replayed, as a command.
    # A torch program on shapes; its peak by kind, and what torch's rules reserve for it.
    # CuPy's pool on a plan; long programs recorded, requests that failed. Threads of torch
    # programs, and storages that are resized. Places that change their size where they are.
    # A short way for CuPy's blocks on the compiled core: device and stream in one call, one object.
    # Pages of a device for CuPy's pool, by the driver alone, preferred to what fits one run.
    # Scripts run on the pools by a command; cores that arrays outlive.
    # torch's rules with expandable segments.
    # An account of memory that a script has broken is said.
    # Several devices in a process: whose memory is asked of which, recorded, named by a command.
    # Events that fail and calls that are broken off; memory of dropped allocators. Pages drawn.
    # Cores that end after finalizers; storages that grow from nothing, tensors in wrappers.
    # Libraries that are not installed.
    "gpu-alloc": 1_130
    + 20
    + 1_170
    + 230
    + 900
    + 290
    + 430
    + 700
    + 400
    + 80
    + 130
    + 80
    + 85
    + 225
    + 237
    + 25
    + 235
    + 50,
    # Ragged, flat and ordered layouts, partial values; plans that move tensors between any two
    # layouts with the fewest bytes, and their execution. Single ranks and few ranks in plain
    # numbers (a tenth of DTensor's planner); layouts of state dicts, and their command.
    # DTensors and strided shards there and back, moved at the byte limit.
    # Exchanges in turns, so that memory is bounded and known, reductions included; every kind of
    # layout, and files of tensors, on the command line.
    # Senders of lists at the limit, by max-flow.
    # A change of layout carried out on local ranks and compared, by a command.
    # Gradients of gradients; what torch cannot reduce, and what no machine holds, said before.
    # Equal specs of equal layouts, sub-meshes of DTensors; devices and kinds of local tensors.
    "mesh-spmd": 2_900 + 900 + 590 + 225 + 1_220 + 120 + 85,
    # Fourteen families instead of one: rules that are read in both directions, specs as files of
    # users, formats found and explained, companions, unknown families, one file a command.
    # Tensors that are computed, in bounded memory: casts, transposes. fp8 and mxfp4 there and back,
    # with kept scales. Runs that are resumed from a journal, and moves. Merges: eleven methods
    # whose norms, ranks and draws are found in passes, so that no tensor is held; stacked layers.
    # LoRA, rsLoRA and DoRA of peft's files. Directories of ranks: cuts from roles, rows woven from
    # short runs, joining; bytes on each rank.
    # Comparisons by values and logits through transformers.
    # Formats of other programs: packed and transposed tensors, pickles read and written as data.
    # Adapters extracted from two models; copies through a pipe.
    # The memory of each computation, limits on it and its prediction. Dense models made MoE ones.
    # A decoder behind a vision tower, and experts that are told to be turned by their dims. Layers
    # that files count anew. One torch thread for what memory bounds.
    # What config.json says of single layers, in merges by passthrough; adapters that changed their
    # model at the beginning.
    # Options of merges and adapters that are of another type, or that nothing reads, refused;
    # layers that are not the decoder's; buffers under other names; what no cast touches.
    # Predictors behind stacked layers, convolutions and magnitudes of adapters, other parts in fp8.
    "weight-convert": 1_670
    + 1_000
    + 950
    + 950
    + 500
    + 1_120
    + 400
    + 2_150
    + 350
    + 720
    + 250
    + 300
    + 168
    + 95,
    # Tokens of padding that no expert sees. Transfers in one order, its proof for process groups
    # that keep one (NCCL), and a transport that leaves such a device alone; torch's builders.
    # Plans for unequal costs: a search among orders. Stages of torch wrapped in data parallelism.
    # Ways of tokens to their experts: routes, payloads, chunks, the shared expert meanwhile.
    # What two ranks send each other as one batch; when computations of a run were, beside the
    # simulator's times, and how long stages take.
    # Ranks with uneven numbers of experts.
    # What the host finds is told before the limit of a device. What a computation runs in.
    # One rank of a pipeline without its neighbours.
    # Receives on devices that are posted before they are announced. Split backwards without memory.
    # A shared expert of which ranks have parts.
    # Failed steps under torch's schedules that leave nothing, every dtype on NCCL.
    # Caps that only a loop keeps; files that are checked before they are forecast.
    # Split graphs asked for other gradients; states of what recompute gets by keyword; types of
    # switches, costs and scopes.
    # Upcycled ranks without experts, rows beside places, runs of positions of groups. Limits,
    # losses and formats of files that mean nothing.
    "moe-pipeline": 150
    + 600
    + 230
    + 120
    + 170
    + 300
    + 110
    + 20
    + 20
    + 115
    + 75
    + 40
    + 65
    + 240
    + 46
    + 15,
    # A load has one identity, alone and over ranks; errors of the file system are named; files that
    # others put into a checkpoint are kept. Structures of nested states and types of values, names
    # across wrappers, tensors made of others, and no optimizer's state that is lost. Stores of
    # objects beside the local directory: a protocol with three clients, commits, ranged reads.
    # States on the nodes themselves with copies on others, instead of a fast folder of one machine.
    # Runs in stores: rotation, a lease, the newest checkpoint whatever a listing shows, resume.
    # Plans of thousands of ranks as columns of numbers, told and made once for a layout; files of
    # one node; manifests that are read in parts, beside those of before.
    # Bytes of devices through rings of pinned memory, packed, on streams of their own.
    # Resharding from and to stores. Savers told of one that dies while all connect. Tombstones
    # against manifests that come late; what the first rank has checked is what ranks load.
    # Agreements that end before a device's own limit.
    # Signs of life of those who wait, by which the dead and the stopped are told from the slow: a
    # roll call, whose cost for the store does not grow with the ranks.
    # A moving average that goes on in another layout of a running job; stores told what is staged.
    # Stored tensors that nothing took, in a load's report; over all ranks that load together. Links
    # of a run's folder in rotation; destinations that share memory, and tied ones of which other
    # values are stored; extra states of modules; tensors without plain memory.
    # Checkpoints of torch DCP written and read by commands, piece by piece. What was saved to a
    # store's URL on disk is read by path; snapshots and savers that end with an error. Exports of
    # what was skipped; a tier that is newer than what is whole in storage. Readers that have seen
    # enough of a command's output, here and in the other commands. Stores that do not answer, and
    # processes without descriptors, told from damage everywhere; names that lead elsewhere.
    "unified-ckpt": 820
    + 120
    + 600
    + 1_500
    + 1_200
    + 1_250
    + 600
    + 1_700
    + 700
    + 80
    + 80
    + 70
    + 20
    + 220
    + 160
    + 75
    + 270
    + 52
    + 100,
}

# Why comm-collectives has 17,000 lines outside checking/ and simulation/, where 10,500 were asked
# for, and 5,500 in those two, where 4,500 were. By room: code, imports, docstrings, and what is
# blank (the formatter's) or a comment:
#
#   base          854   100   293   239   tensors as bytes; streams over TCP and in shared memory
#   call        3,184   422 1,014   841   one call: frames, agreement, failures, circles, devices
#   collectives 1,949   326   783   464   seven collectives, overlap, buckets; 18 functions of torch
#   moe         1,278   177   516   315   dispatch, combine, three routes, three payloads, DeepEP
#   nested        649    51   152   157   values with tensors in them, without pickle
#   p2p           177    37   163    53   between two ranks, with gradients
#   planning      682    78   237   176   plans of bytes and times, without torch
#   shm           654    89   204   215   the backend comm_shm
#   root          202    64    70    83   errors, the command, torch's private names
#   together    9,629 1,344 3,432 2,543
#
# Code and imports alone are 11,000. Docstrings and blanks are a third of every room and follow the
# code, so 10,500 lines are about 6,800 of code and imports: 4,200 less, more than planning, nested,
# p2p, DeepEP and the backend have together, all of them public. Every function and class of src has
# a caller. The largest cut left, `comm_shm` made of the drop-ins (600 lines), was tried: in one run
# on two ranks the drop-ins have 0.65 to 0.8 of its speed up to 64 KiB, 0.68 for an all_reduce and
# 0.61 for a reduce_scatter of 8 MiB, before torch's dispatcher is added. Bare torch's cells in
# `check --raw` (140) are an option that users read of.


def check_lines(
    packages: Sequence[Package], *, root: Path, before: Mapping[str, int] = LINES_BEFORE
) -> list[Problem]:
    """One problem for each package that grew, if all packages together did."""
    now = {package.name: count_lines(package) for package in packages}
    allowed = {name: lines + LINES_ADDED.get(name, 0) for name, lines in before.items()}
    excess = sum(now.values()) - sum(allowed.values())
    if excess <= 0:
        return []
    return [
        Problem(
            path=f"{package.folder.relative_to(root).as_posix()}/src",
            line=1,
            message=f"{now[package.name]} lines of .py and .pyi, {allowed.get(package.name, 0)} "
            f"allowed; all packages together are {excess} lines above {sum(allowed.values())}: "
            "shorten, or argue for more in scripts/gates/lines.py",
        )
        for package in packages
        if now[package.name] > allowed.get(package.name, 0)
    ]


def count_lines(package: Package) -> int:
    """The lines of a package's .py and .pyi files."""
    files = [f for f in (package.folder / "src").rglob("*.py*") if f.suffix in (".py", ".pyi")]
    return sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files)
