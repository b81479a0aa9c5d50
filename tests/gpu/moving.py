"""Programs that are larger than what they may use of their GPU: how long they take with moving off and on, to the same program
with everything local. GPU 0 lends less by GPUPOOL_LIMIT, and the rest lies on another GPU or on the host."""

import re
import statistics

import building
import native
import pytorch
from client import client, needs_modules, needs_two_gpus, on_peers, rank_client
from machine import GIB, MIB
from running import BelowGoal, Failed, NotRun, same


def alone(lab):
    """With nothing but the first GPU to be seen, what does not fit goes to the host."""
    return {"CUDA_VISIBLE_DEVICES": lab.machine.gpus[0].selector or "0"}


def settled(milliseconds):
    """Of an iteration, once memory lies where it is to lie: the median of the last third."""
    return statistics.median(milliseconds[-max(3, len(milliseconds) // 3) :])


def _settles(times, ended, swaps):
    """In words, from which iteration on each is as fast as when settled, by a tenth, when that was, and what moved until then and after. Of three iterations
    the middle one counts, so that a single slow one is none that says it had not settled."""
    at_most = 1.1 * settled(times)
    slow = [number for number in range(len(times) - 2) if statistics.median(times[number : number + 3]) > at_most]
    first = slow[-1] + 1 if slow else 0
    when = ended[first] - times[first] / 1e3
    moved = [sum(swap["bytes_in"] + swap["bytes_out"] for swap in swaps if (swap["t"] <= when) == is_before) / GIB for is_before in (True, False)]
    began = ended[0] - times[0] / 1e3
    return f"  settled from iteration {first + 1} on, {when - began:.1f} s after the first began; {moved[0]:.1f} GiB moved until then, {moved[1]:.1f} after"


def _moves(run):
    """What moved in a run, in lines: swaps by why they were made, stops, and what the log noted about moving."""
    lines = []
    swaps = run.events("tier.swap")
    for why in sorted({swap["why"] for swap in swaps}):
        these = [swap for swap in swaps if swap["why"] == why]
        came, left = (sum(swap[way] for swap in these) / GIB for way in ("bytes_in", "bytes_out"))
        took, stopped = (sum(swap[what] for swap in these) / 1e3 for what in ("microseconds", "stopped"))
        same = sum(swap["as_it_came"] for swap in these) / GIB
        ways = f"{came:.1f} GiB in, {left:.1f} GiB out ({same:.1f} not copied)"
        lines.append(f"  {why}: {len(these)} swaps, {ways}, {took:.0f} ms, {stopped:.0f} of them stopped")
    lines += [f"  stopped on GPU {stop['home']}: {stop['why']}" for stop in run.events("tier.stop")]
    notes = [f"  note {note.get('about')}: {note.get('message', '')}"[:300] for note in run.events("note")]
    # A private table is told of once for each of its functions.
    lines += list(dict.fromkeys(note for note in notes if "export_table" not in note))
    for reader in run.events("tier.reader")[-4:]:
        lines.append(f"  {reader['function'][:60]} lost {reader['lost']:.2f} s in {reader['launches']}: {reader['why']}")
    lines += [f"  {line}" for line in run.stderr.splitlines() if "came near" in line or "lay outside" in line]
    return lines


def _link(lab, is_host):
    """Bytes a second that a copy to GPU 0 reaches, from another GPU (whose clock its context keeps up) or from the host; measured once a run."""
    if "links" not in lab.kept:
        lab.kept["links"] = lab.bare(client("links.py"), 60).succeeded().measured()
    return lab.kept["links"]["host" if is_host else "peer"]


def _floor(lab, local, measured):
    """Milliseconds of an iteration that uses each of its bytes once and copies none: what lies near at the speed of the GPU, what lies far at that of
    its link. Whoever moves can be faster only for what is used again before it leaves."""
    used = measured["used"]
    far = {place: size for place, size in used.items() if place != "gpu0"}
    share = 1 - sum(far.values()) / sum(used.values())
    return local * share + sum(1e3 * size / _link(lab, place.startswith("host")) for place, size in far.items() if size)


def _told(name, times, local):
    """One run's line: an iteration when settled, its ratio to all local, and how the first ones went."""
    first = " ".join(f"{time:.1f}" for time in times[:12])
    return f"{name}: {settled(times):.2f} ms, {settled(times) / local:.3f} of all local; first: {first}; least {min(times):.2f}"


def _bare(lab, command, timeout, env):
    """The program bare, once for all checks that have the same."""
    key = ("bare", *map(str, command), *sorted((env or {}).items()))
    if key not in lab.kept:
        lab.kept[key] = lab.bare(command, timeout, env).succeeded()
    return lab.kept[key]


def _compared(lab, command, settings, goals, timeout=90, env=None, alike=same, of_floor=None):
    """Bare, then with each of the settings, moving off and on, lenders asleep and awake as asked for; `goals` names the most that a setting's ratio
    may be. `of_floor`: for these of the client's times, what part of the links' speed they have to reach."""
    of_floor = of_floor or {}
    bare = _bare(lab, command, timeout, env)
    local = settled(bare.measured()["milliseconds"])
    lines, missed = [_told("all local", bare.measured()["milliseconds"], local)], []
    for name, limits in settings.items():
        for move, lenders in [(move, lenders) for move in lab.moves for lenders in lab.lenders]:
            run = alike(bare, lab.shim(command, timeout, {"LOG": "debug", "LENDERS": lenders, **limits, "MOVE": move}, env))
            measured = run.measured()
            held = ", ".join(f"{place} {size / GIB:.1f}" for place, size in measured["held"].items())
            how = f"{name}, {move}" + ", lenders awake" * (limits.get("LENDERS", lenders) == "awake")
            lines.append(f"{_told(how, measured['milliseconds'], local)}; GiB: {held}")
            if move != "off":
                lines.append(_settles(measured["milliseconds"], measured["ended"], run.events("tier.swap")))
            lines += _moves(run)
            ratio = settled(measured["milliseconds"]) / local
            is_far = on_peers(measured["held"]) or measured["held"].get("host0") or run.events("vmm.steer")
            if not is_far:
                raise Failed(f"{run.command}: everything lay on GPU 0: {measured['held']}", lines)
            # What a program maps itself is in no pool.
            for what in dict.fromkeys(["milliseconds", *of_floor]) if sum(measured["used"].values()) else []:
                floor = _floor(lab, settled(bare.measured()[what]), measured)
                reached = floor / settled(measured[what])
                lines.append(f"  {what}: {settled(measured[what]):.2f}, floor of the links without copies {floor:.2f}, {reached:.2f} of their speed")
                if move == "auto" and reached < of_floor.get(what, 0):
                    missed.append(f"{how}: {what} at {reached:.2f} of the links' speed, goal {of_floor[what]}")
            if move == "auto" and ratio > goals.get(name, ratio):
                missed.append(f"{how}: {ratio:.3f}, goal {goals[name]}")
    if missed:
        raise BelowGoal("; ".join(missed), lines)
    return f"within the goals {goals}", lines


def rotation(lab):
    """Matrices of 512 MiB in rotation through a product; GPU 0 lends room for 20 of 32."""
    needs_modules("torch")
    needs_two_gpus(lab)
    return _compared(lab, client("torch_rotation.py", 32, 12), {"10 GiB": {"LIMIT": "0:10GiB"}}, {"10 GiB": 1.08})


def rotation_graph(lab):
    """The same, one round of it a graph."""
    needs_modules("torch")
    needs_two_gpus(lab)
    return _compared(lab, client("torch_rotation.py", 32, 12, "graph"), {"10 GiB": {"LIMIT": "0:10GiB"}}, {"10 GiB": 1.3})


def rotation_host(lab):
    """The same with the host as the only other place."""
    needs_modules("torch")
    settings = {"10 GiB and host": {"LIMIT": "0:10GiB"}}
    return _compared(lab, client("torch_rotation.py", 32, 6), settings, {"10 GiB and host": 5}, 120, alone(lab))


def _trained(bare, shim):
    """A training run that went as it does bare. Attention adds up in an order that changes from run to run."""
    same(bare, shim)
    for one, other in zip(bare.measured()["losses"], shim.measured()["losses"]):
        if abs(one - other) > 0.02 * abs(one):
            raise Failed(f"{shim.command}: losses {shim.measured()['losses']}, bare {bare.measured()['losses']}")
    return shim


TRAINING = {"1.2": 36.3, "1.56": 28.0, "2": 21.8}
TRAINING_GOALS = {"1.2": 1.15, "1.56": 1.30, "2": 1.45}


def _training(lab, size, *words):
    needs_modules("torch")
    needs_two_gpus(lab)
    settings = {size: {"LIMIT": f"0:{int(TRAINING[size] * 1024)}MiB"}}
    return _compared(lab, client("torch_large.py", 20, *words), settings, TRAINING_GOALS, alike=_trained)


def training(lab):
    """A transformer trained with AdamW, 1.2 times what GPU 0 lends."""
    return _training(lab, "1.2")


def training_more(lab):
    """The same, 1.56 times."""
    return _training(lab, "1.56")


def training_twice(lab):
    """The same, twice."""
    return _training(lab, "2")


def training_graph(lab):
    """The same as a graph, 1.2 times."""
    return _training(lab, "1.2", "graph")


def training_expandable(lab):
    """The same with expandable segments, 1.2 times: PyTorch makes and maps its memory itself."""
    needs_modules("torch")
    needs_two_gpus(lab)
    settings = {"1.2": {"LIMIT": f"0:{int(TRAINING['1.2'] * 1024)}MiB"}}
    env = pytorch.EXPANDABLE
    return _compared(lab, client("torch_large.py", 20), settings, TRAINING_GOALS, env=env, alike=_trained)


def training_host(lab):
    """The same with the host as the only other place, 1.2 times."""
    needs_modules("torch")
    settings = {"1.2 and host": {"LIMIT": f"0:{int(TRAINING['1.2'] * 1024)}MiB"}}
    return _compared(lab, client("torch_large.py", 18), settings, {"1.2 and host": 2.2}, 120, alone(lab), _trained)


def decoding(lab):
    """Weights of 24 GiB read once a step; GPU 0 has 16 of them. What both links bring together is the goal, with lenders awake."""
    needs_modules("torch")
    needs_two_gpus(lab)
    settings = {"16 GiB": {"LIMIT": "0:16GiB", "LENDERS": "awake"}}
    return _compared(lab, client("torch_decode.py", 60), settings, {}, of_floor={"milliseconds": 0.95})


def cupy(lab):
    """A network trained with momentum in CuPy, 1.3 times what GPU 0 lends."""
    needs_modules("cupy")
    needs_two_gpus(lab)
    settings = {"19 GiB": {"LIMIT": "0:19GiB"}}
    return _compared(lab, client("cupy_large.py", 16), settings, {"19 GiB": 1.3}, env={"CUPY_TF32": "1"}, alike=_trained)


def jax(lab):
    """A network trained with Adam in JAX, 1.3 times what GPU 0 lends. Its memory is its own; its first step tries kernels out."""
    needs_modules("jax")
    needs_two_gpus(lab)
    settings, env = {"16 GiB": {"LIMIT": "0:16GiB"}}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return _compared(lab, client("jax_large.py", 12), settings, {"16 GiB": 1.3}, env=env, alike=_trained)


def language_model(lab):
    """A language model, 1.5 times what GPU 0 lends: the time of reading 4 x 4 096 tokens, and that of a word."""
    needs_modules("torch", "transformers")
    needs_two_gpus(lab)
    settings = {"17 GiB": {"LIMIT": "0:17GiB"}}
    return _compared(lab, client("torch_llm.py", 6, 24), settings, {"17 GiB": 1.3}, of_floor={"decode": 0.9})


def language_model_host(lab):
    """The same with the host as the only other place: 12 GiB have to cross its link in each reading."""
    needs_modules("torch", "transformers")
    settings = {"17 GiB and host": {"LIMIT": "0:17GiB"}}
    return _compared(lab, client("torch_llm.py", 4, 12), settings, {"17 GiB and host": 2}, 200, alone(lab))


def fsdp(lab):
    """Two ranks that share a model, each with some of its memory on the host: no rank waits for one that waits for moves."""
    needs_modules("torch")
    needs_two_gpus(lab)
    return _compared(lab, rank_client("fsdp_large.py", 12), {"25 GiB": {"LIMIT": "25GiB"}}, {"25 GiB": 4}, 200, alike=_trained)


def ranks(lab):
    """Two ranks over NCCL whose memory moves at every opportunity, from the host and back: the same lines as bare. Where a collective waits for the other
    rank its GPU is not idle, and nobody may wait for that."""
    needs_modules("torch")
    needs_two_gpus(lab)
    settings, lines = {"LIMIT": "512MiB", "HOST_LIMIT": "2GiB", "MOVE": "stress", "LOG": "debug"}, []
    for script in ("ddp.py", "nccl_graph.py"):
        bare = lab.bare(rank_client(script), 120).succeeded()
        shim = lab.shim(rank_client(script), 120, settings).succeeded()
        if sorted(bare.lines()) != sorted(shim.lines()):
            raise Failed(f"{script}: lines differ: shim {sorted(shim.lines())}, bare {sorted(bare.lines())}"[:500], lines)
        lines += [f"{script}, {shim.seconds:.1f} s (bare {bare.seconds:.1f}):", *_moves(shim)]
        if script == "ddp.py" and not shim.events("tier.swap"):
            raise Failed(f"{script}: nothing moved", lines)
    return f"the same lines as bare; {len(lines)} lines below", lines


def collective(lab):
    """One process with two GPUs, whose collective is begun on one of them first, while launches there use memory that may come near."""
    needs_modules("cupy")
    needs_two_gpus(lab)
    command, lines = client("cupy_collective.py"), []
    bare = lab.bare(command, 60)
    if bare.status:
        raise NotRun(f"fails without us too: {(bare.stderr.strip().splitlines() or ['no word'])[-1]}")
    for move in ("auto", "stress"):
        run = same(bare, lab.shim(command, 90, {"LIMIT": "0:512MiB", "MOVE": move, "LOG": "debug"}))
        lines += [f"{move}, {run.seconds:.1f} s (bare {bare.seconds:.1f}):", *_moves(run)]
    return f"sums as bare; {len(lines)} lines below", lines


def phases(lab):
    """What a swap takes besides copying, in microseconds, by what the log says at level trace: medians of the second half of all swaps."""
    needs_modules("torch")
    needs_two_gpus(lab)
    programs = {"rotation": (client("torch_rotation.py", 32, 9), "0:10GiB"), "training": (client("torch_large.py", 16), "0:28672MiB")}
    lines = []
    for name, (command, limit) in programs.items():
        run = lab.shim(command, 90, {"LOG": "gpupool::memory=trace", "LIMIT": limit, "MOVE": "auto"}).succeeded()
        told = [PHASES.search(note.get("message", "")) for note in run.events("note") if note.get("about") == "swaps"]
        rows = [phase.groupdict() for phase in told if phase]
        medians = {what: statistics.median(int(row[what]) for row in rows[len(rows) // 2 :]) for what in rows[0]} if rows else {}
        lines.append(f"{name}: {len(rows)} rearrangements; {', '.join(f'{what} {value:.0f}' for what, value in medians.items())}")
    return f"{len(lines)} lines below", lines


PHASES = re.compile(
    r"prepared in (?P<prepared>\d+) µs, waited (?P<waited>\d+) µs, closed for (?P<closed>\d+) µs; (?P<in_all>\d+) µs from the wait to the end, "
    r"(?P<copying>\d+) of it copying, (?P<unmapping>\d+) unmapping, (?P<mapping>\d+) mapping, (?P<granting>\d+) granting and (?P<looking>\d+) looking"
)


def program(lab):
    """tests/programs/rotation.c: sums of arrays, the words right, moving off, on and at every opportunity."""
    binary = building.program(lab, "rotation")
    words = [binary, "32", "512", "4", "4"]
    bare = lab.bare(words, 90).succeeded()
    lines = []
    for how, move in (("", "off"), ("", "auto"), ("", "stress"), ("graphs", "auto"), ("ahead", "auto")):
        run = lab.shim([*words, *[how] * bool(how)], 90, {"LIMIT": "0:10GiB", "MOVE": move, "LOG": "debug"})
        times = [line for line in run.stderr.splitlines() if line.startswith("round")]
        lines += [f"{how or 'launches'}, {move}: {'; '.join(times)}", *_moves(same(bare, run))]
    lines += [f"bare: {line}" for line in bare.stderr.splitlines()]
    return f"{len(lines)} lines below", lines


# Programs of tests/programs whose memory moves at every opportunity, and whether each of them leaves some for sure.
STRESSED = [
    ("fill_spread", "8 64 130 200", True),
    ("rotation", "12 8 3 6 segments", True),
    ("rotation", "12 8 3 6 arena", True),
    ("own_moves", "churn 4 80", True),
    ("by_value", "16 8 20", True),
    *[("rotation", f"16 8 3 6 {beside}", True) for beside in ("forks", "loads", "stops", "leaves")],
    ("graphs", "replay", False),
    ("steps", "a:100 a:3 f:0 a:50 c:1 c:2 s f:1 f:2", False),
    ("all_at_once", "1", False),
    *[("never_stuck", part, False) for part in native.NEVER_IDLE],
]
STRESSED_TWO = [("all_at_once", "2", False), ("never_stuck", "flags", False)]


def stressed(lab):
    """GPUPOOL_MOVE=stress under programs that use memory which no argument names, from threads, graphs, their own mappings and GPUs that are never
    idle: the same lines as bare."""
    needs_two_gpus(lab)
    settings = {"LIMIT": "96MiB", "HOST_LIMIT": "3GiB", "MOVE": "stress", "LOG": "debug"}
    lines, wrong = [], []
    for name, words, must in STRESSED + STRESSED_TWO:
        command = [building.program(lab, name), *words.split()]
        try:
            run = same(lab.bare(command, 60).succeeded(), lab.shim(command, 90, settings))
        except Failed as failure:
            wrong.append(str(failure))
            continue
        swaps = run.events("tier.swap")
        came, left = (sum(swap[way] for swap in swaps) / MIB for way in ("bytes_in", "bytes_out"))
        lines.append(f"{name} {words}: {len(swaps)} swaps, {came:.0f} MiB in, {left:.0f} MiB out, {run.seconds:.1f} s")
        if must and not (came and left):
            wrong.append(f"{run.command}: nothing moved")
    if wrong:
        raise Failed(f"{len(wrong)} of {len(STRESSED + STRESSED_TWO)} runs are wrong, as listed below", wrong + lines)
    return f"{len(lines)} programs print the same as bare", lines


def own(lab):
    """tests/programs/own_moves.c: memory of cuMemCreate that threads map, use and unmap at random, while launches move it."""
    needs_two_gpus(lab)
    words = [building.program(lab, "own_moves"), "churn", "4", "1000"]
    bare = lab.bare(words, 90).succeeded()
    lines = []
    for move in ("auto", "stress"):
        run = same(bare, lab.shim(words, 90, {"LIMIT": "0:96MiB", "MOVE": move, "LOG": "debug"}))
        lines += [f"{move}, {run.seconds:.1f} s (bare {bare.seconds:.1f}):", *_moves(run)]
        # By itself a program that uses so little each time may never be worth a move.
        if move == "stress" and not run.events("tier.swap"):
            raise Failed(f"{run.command}: nothing moved", lines)
    return f"checks as bare, none wrong; {len(lines)} lines below", lines
