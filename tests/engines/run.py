#!/usr/bin/env python3
"""Tests the plug-in for hosts of ggml (engines/ggml) inside hosts, with the CPU executor as its device.

    run.py WORK LIBRARY PLUGIN [--sample]
    run.py WORK --fetch

WORK is where packages are unpacked and hosts built, which later runs find again. LIBRARY is the folder of libnvbackend, PLUGIN
the path of libggml-nvb.so. --fetch: only gets the package that a sample needs. --sample: one host, and some cases of every
operation; else every case, the models, and the prebuilt hosts. Needs the package registries of Python and of Node unless WORK has
their packages.
"""

import array
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# The host that is built, and packages whose headers the declarations are compared with.
HOST = ("llama-cpp-python", "0.3.36")
LAYOUTS = [(HOST, "Tables_0_10"), (("llama-cpp-python", "0.3.20"), "Tables_0_9")]
# A host of the interface's number 1.
OLD_HOST = ("llama-cpp-python", "0.3.16")
# Wheels with prebuilt copies of ggml, and their library that exports ggml_backend_load.
WHEELS = [(("pywhispercpp", "1.5.1"), "pywhispercpp.libs/libggml-6*.so*"), (("libggml-python", "0.20.2.post1"), "libggml/lib64/libggml.so")]
PREBUILT = ("@node-llama-cpp/linux-x64", "3.22.1")

# Operations of test-backend-ops: the cases that pass at least, and which of them a sample runs.
OPERATIONS = {
    "ADD_ID": (36, "."), "ADD": (154, "f32.*ne=\\[(10|16),5"), "ARGMAX": (7, "."), "ARGSORT": (98, "ne=\\[(3|4|16|1025|2048|4095),"), "CLAMP": (6, "."), "CONCAT": (112, "type=f32"),
    "CONT": (78, "."), "CPY": (393, "type_src=(f32|f16|q8_0),type_dst=(f16|f32|q8_0|q4_0)"), "DIV": (142, "f32.*ne=\\[(10|16),5"),
    "DUP": (9, "."), "EXP": (1, "."), "FLASH_ATTN_EXT": (5290, "hsk=64.*nr23=\\[4,3\\].*kv=512,nb=3,"),
    "GEGLU": (1, "."), "GEGLU_ERF": (1, "."), "GELU": (1, "."), "GET_ROWS": (144, "type=(f32|f16|q8_0|q4_K|q6_K)"),
    "L2_NORM": (30, "."), "MEAN": (10, "."),
    "MUL": (142, "f32.*ne=\\[(10|16),5"), "MUL_MAT_ID": (589, "type_a=(f32|q4_0|q4_K),type_b=f32,n_mats=4,n_used=2"), "MUL_MAT": (1035, "type_a=(f32|f16|q4_0|q8_0|q4_K|q6_K|mxfp4),type_b=f32,m=16,n=(1|8),k=256"),
    "NEG": (1, "."), "NORM": (50, "."), "RELU": (1, "."), "REPEAT": (16, "type=f32"), "RMS_NORM": (51, "."),
    "ROPE": (470, "ne_a=\\[128,32,2,1\\],n_dims=128,mode=[02]"), "SCALE": (7, "."), "SET_ROWS": (271, "type_dst=(f32|f16|q8_0|q4_0)"),
    "SIGMOID": (1, "."), "SILU": (1, "."), "SOFT_MAX": (214, "ne=\\[16,2,32,1\\]"), "SQR": (6, "."), "SQRT": (6, "."),
    "SUB": (142, "f32.*ne=\\[(10|16),5"), "SUM_ROWS": (10, "."), "SWIGLU": (1, "."), "TANH": (1, "."), "TOP_K": (525, "ne=\\[(16|60|1025|4096),"),
}

# Of each comparison of tokens.
TOKENS = 128
# How far logits, which are some 10, may be from those of ggml-cpu in F32 with a cache in F32. Additions in another order are
# worth up to 1.4e-4. ggml-cpu's GELU is a table over F16, which makes a step of F16 of a difference in the last bit of F32:
# up to 2.4e-3 was seen.
NEAREST = {"llama": 5e-4, "gemma3": 5e-3, "qwen3": 5e-4, "qwen3moe": 5e-4}
# Of all 9,984 tokens, how many may be neither ggml-cpu's nor those in F32.
MOST_LOST = 6

# Of test-llama-archs, how many models' logits agree at least; and what is known not to, with the reason.
ARCHITECTURES = 60
DISAGREE = {"deepseek32": "an ADD behind FILL and SET_ROWS, which are the host's, gives logits that vary from run to run; without ADD they agree"}

# What runs where not a sample does: all but three cases of 128 experts, whose weights test-backend-ops takes minutes each to quantise.
WHOLE = {"MUL_MAT_ID": "n_mats=([1248]|16|32|512|1024),"}


def say(text):
    print(f"engines: {text}", flush=True)


def fail(text):
    sys.exit(f"engines: {text}")


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def python_with_pip():
    """This Python, or where it has no pip the one that `make setup` made."""
    has_pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0
    return sys.executable if has_pip else ROOT / ".toolchain" / "venv" / "bin" / "python"


class Packages:
    """Packages from the registries, each unpacked once."""

    def __init__(self, work):
        self.work = work

    def _unpacked(self, name, version, fetch):
        folder = self.work / "packages" / f"{name.strip('@').replace('/', '-')}-{version}"
        if (folder / "done").exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fetch(folder)
        for archive in [*folder.glob("*.tar.gz"), *folder.glob("*.tgz")]:
            with tarfile.open(archive) as opened:
                # Older releases of Python 3.9 to 3.11 have no filters.
                opened.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        for archive in folder.glob("*.whl"):
            zipfile.ZipFile(archive).extractall(folder)
        (folder / "done").touch()
        return folder

    def source(self, name, version):
        """The folder of llama.cpp in a source package of llama-cpp-python."""
        fetch = lambda folder: run(python_with_pip(), "-m", "pip", "download", "--no-deps", "--no-binary", name,
                                   f"{name}=={version}", "-d", folder)
        folder = self._unpacked(name, version, fetch)
        return next(folder.glob("*/vendor/llama.cpp"))

    def wheel(self, name, version):
        fetch = lambda folder: run(python_with_pip(), "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
                                   f"{name}=={version}", "-d", folder)
        return self._unpacked(name, version, fetch)

    def node(self, name, version):
        fetch = lambda folder: run("npm", "pack", f"{name}@{version}", cwd=folder)
        return self._unpacked(name, version, fetch)


def build_host(work, source):
    """ggml, its CPU back end and test-backend-ops; the folder of their binaries."""
    started = time.monotonic()
    folder = work / "host"
    run("cmake", "-S", HERE, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DENGINE_HOST_SOURCE={source}")
    run("cmake", "--build", folder)
    say(f"the host is built ({time.monotonic() - started:.0f} s)")
    return folder / "bin"


def build_llama(work, source):
    """llama.cpp and test-llama-archs; the folder of their binaries."""
    started = time.monotonic()
    folder = work / "llama"
    run("cmake", "-S", HERE, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DENGINE_HOST_SOURCE={source}", "-DENGINE_HOST_LLAMA=ON")
    run("cmake", "--build", folder, "--target", "test-llama-archs")
    say(f"llama.cpp is built ({time.monotonic() - started:.0f} s)")
    return folder / "bin"


def check_old_host(work, packages, plugin):
    """The package's ggml, whose plug-ins have another number of their interface, gets the line of refusal."""
    name, version = OLD_HOST
    folder = work / "old-host"
    run("cmake", "-S", packages.source(name, version) / "ggml", "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DGGML_CPU=OFF",
        "-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_CCACHE=OFF", "-DGGML_OPENMP=OFF")
    run("cmake", "--build", folder, "--target", "ggml")
    library = next(folder.glob("**/libggml.so"))
    say(run(sys.executable, HERE / "load.py", library, plugin, "--refused", "layout of ggml").strip() + f" ({name} {version})")


def check_architectures(binaries):
    """Random models of every architecture that llama.cpp has: logits beside those of ggml-cpu, and a round trip of the model."""
    started = time.monotonic()
    done = subprocess.run([binaries / "test-llama-archs", "-b", "NVB0"], capture_output=True, text=True)
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    passed = re.findall(r"^\|[^|]*\|[^|]*\|[^|]*\| *OK \(([0-9.e+-]+)\)", text, re.MULTILINE)
    failed = re.findall(r"^\| *([^ |]+) *\|.*FAIL.*", text, re.MULTILINE)
    unknown = [name for name in failed if name not in DISAGREE]
    if unknown or "Summary" not in text or len(passed) < ARCHITECTURES:
        fail(f"test-llama-archs: {done.returncode}, {len(passed)} models pass, at least {ARCHITECTURES} have to; not {', '.join(unknown)}\n"
             + text[-1000:] + done.stderr[-1000:])
    for name in failed:
        say(f"{name} does not agree, as is known: {DISAGREE[name]}")
    worst = max(map(float, passed))
    say(f"{len(passed)} models of llama.cpp's architectures: errors of up to {worst:.1e} ({time.monotonic() - started:.0f} s)")


def check_layouts(packages):
    for (name, version), tables in LAYOUTS:
        ggml = packages.source(name, version) / "ggml"
        command = ["c++", "-std=c++17", "-fsyntax-only", f"-I{ggml}/include", f"-I{ggml}/src", f"-I{ROOT}/include"]
        run(*command, f"-DNVB_TABLES={tables}", HERE / "abi_layout.cpp")
        others = {"Tables_0_9", "Tables_0_10"} - {tables}
        for other in others:
            done = subprocess.run([*map(str, command), f"-DNVB_TABLES={other}", str(HERE / "abi_layout.cpp")], capture_output=True)
            if done.returncode == 0:
                fail(f"{name} {version}: {other} fits as well, so the comparison sees nothing")
        say(f"the headers of {name} {version} have the layout {tables}")


def check_refusals(work, plugin):
    for name, options in [("fake_host", []), ("silent_host", ["-DEXPORTS_NOTHING"])]:
        run("cc", "-rdynamic", *options, HERE / "fake_host.c", "-ldl", "-o", work / name)
    for version in ["0.8.9", "0.9.0", "0.26.0", "0.99.1", "1.0.0", "", "nonsense"]:
        done = subprocess.run([work / "fake_host", plugin], capture_output=True, text=True, env={**os.environ, "FAKE_VERSION": version})
        if done.stdout != "refused\n" or "this plug-in knows ggml" not in done.stderr or done.stderr.count("\n") != 1:
            fail(f"version {version!r}: {done.returncode} {done.stdout}{done.stderr}")
    done = subprocess.run([work / "silent_host", plugin], capture_output=True, text=True)
    if done.stdout != "refused\n" or "does not export ggml_version" not in done.stderr:
        fail(f"a host without functions: {done.returncode} {done.stdout}{done.stderr}")
    say("unknown versions, and a host that exports nothing, are refused with one line")


def check_programs(work, source, binaries, library, plugin):
    """Programs linked with the host that was built: allocations that fail, two threads, a thousand times of use; and graphs
    that are recorded."""
    without = {key: value for key, value in os.environ.items() if key != "GGML_BACKEND_PATH"}
    for name in ("failures", "recordings", "joined", "experts", "packed"):
        program = work / name
        run("c++", "-std=c++17", "-O1", "-rdynamic", f"-I{source}/ggml/include", f"-I{ROOT}/include", HERE / f"{name}.cpp",
            *(binaries / f"lib{library_of_host}.so" for library_of_host in ("ggml", "ggml-base")), "-Wl,--no-as-needed",
            library / "libnvbackend.so", "-ldl", "-pthread", f"-Wl,-rpath,{binaries}", f"-Wl,-rpath,{library}", "-o", program)
        say(run(program, plugin, env=without).strip())


def check_threads(work, source, binaries, library):
    """Two contexts in two threads under ThreadSanitizer, which sees the plug-in and the program: libraries are as they are."""
    sanitized = ["c++", "-std=c++17", "-O1", "-g", "-fsanitize=thread", f"-I{ROOT}/include", "-Wl,--no-as-needed", library / "libnvbackend.so",
                 f"-Wl,-rpath,{library}", "-ldl", "-pthread"]
    plugin, program = work / "libggml-nvb-threads.so", work / "threads"
    run(*sanitized, "-shared", "-fPIC", "-fvisibility=hidden", *sorted((ROOT / "engines" / "ggml").glob("*.cpp")), "-o", plugin)
    run(*sanitized, "-rdynamic", f"-I{source}/ggml/include", HERE / "failures.cpp", *(binaries / f"lib{name}.so" for name in ("ggml", "ggml-base")),
        f"-Wl,-rpath,{binaries}", "-o", program)
    without = {key: value for key, value in os.environ.items() if key != "GGML_BACKEND_PATH"}
    # Without random addresses, because some kernels place a library where the sanitizer wants its own memory.
    say(run("setarch", "-R", program, plugin, "--threads", env={**without, "TSAN_OPTIONS": "exitcode=66"}).strip() + " under ThreadSanitizer")


def test_operations(binaries, names, pattern, environment=None):
    """For each operation the cases that pass, those left to the host, and those that fail. The program makes all cases of
    all operations at its start, which takes it most of a second."""
    command = [binaries / "test-backend-ops", "-b", "NVB0", "-o", ",".join(names)]
    if pattern:
        command += ["-p", pattern]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    failed = re.findall(r".*FAIL.*", text) or ([] if done.returncode == 0 else [text[-2000:] + done.stderr[-2000:]])
    lines = lambda name, end: len(re.findall(rf"^ *{name}\(.*{end}", text, re.MULTILINE))
    return [(name, lines(name, r"\): OK"), lines(name, "not supported"), failed) for name in names]


def check_operations(binaries, sample):
    started, total = time.monotonic(), 0
    runs = [([name], WHOLE.get(name)) for name in OPERATIONS]
    if sample:
        patterns = {}
        for name, (_, pattern) in OPERATIONS.items():
            patterns.setdefault(pattern, []).append(name)
        runs = [(names, pattern) for pattern, names in patterns.items()]
    with concurrent.futures.ThreadPoolExecutor(1 if sample else 2) as pool:
        for job in [pool.submit(test_operations, binaries, *one) for one in runs]:
            for name, passed, unsupported, failed in job.result():
                least = 1 if sample else OPERATIONS[name][0]
                if failed or passed < least:
                    fail(f"{name}: {passed} cases pass, at least {least} have to\n" + "\n".join(failed[:10]))
                total += passed
                say(f"{name}: {passed} cases pass, {unsupported} are left to the host")
    # As a GPU computes them: inputs, and quantised weights of many rows, in 16 bits.
    pattern = "m=16,n=(9|16),k=256|n=(32|64|77|128)," if sample else None
    (name, passed, _, failed), = test_operations(binaries, ["MUL_MAT"], pattern, {"NVB_GGML_NARROW": "1"})
    if failed or passed < 10:
        fail(f"{name} with inputs in 16 bits: {passed} cases pass\n" + "\n".join(failed[:10]))
    say(f"{name}: {passed} cases pass with inputs in 16 bits")
    say(f"{total} cases of test-backend-ops pass ({time.monotonic() - started:.0f} s)")


def check_models(work, packages):
    """The prebuilt llama.cpp gives on NVB0 the tokens that it gives on the CPU.

    ggml-cpu rounds activations to the type of 16-bit weights and caches, which the library does not, so the two differ by
    rounding, and a choice between two tokens may hang on it. The measure is ggml-cpu on the same weights in F32 with a cache
    in F32. With such a cache the library must give its logits but for the order of additions, and so its tokens; GLU is left
    to ggml-cpu then, whose GELU is a table over F16. With a cache in F16, the default, the library must be at least as near to it
    as ggml-cpu is, but for what that table is worth, and may choose another token than ggml-cpu only where ggml-cpu's own
    distance from it, in the same run, is large enough to turn the choice around. Few of these may not be the choice in F32
    either.
    """
    prebuilt = next(packages.node(*PREBUILT).glob("package/bins/linux-x64"))
    source = packages.source(*HOST)
    libraries = [next(prebuilt.glob(pattern)) for pattern in ("libllama.*", "libggml.*", "libggml-base.*")]
    program = work / "tokens"
    run("c++", "-std=c++17", "-O1", f"-I{source}/include", f"-I{source}/ggml/include", HERE / "tokens.cpp", *libraries,
        f"-Wl,-rpath,{prebuilt}", "-o", program)
    run(sys.executable, HERE / "models.py", work / "models")
    without = {key: value for key, value in os.environ.items() if key != "GGML_BACKEND_PATH"}
    turned, lost = 0, 0
    for model in sorted((work / "models").glob("*.gguf")):
        # Each model beside its own weights in F32.
        if model.name.endswith("-as-f32.gguf"):
            continue
        exact = model.with_name(f"{model.stem}-as-f32.gguf")
        exact = exact if exact.exists() else model
        for prompt in (1, 40, 600):
            for flash in ("0", "1"):
                what = f"{model.name}, prompt of {prompt}, {'with' if flash == '1' else 'without'} flash attention"
                counts = compare_tokens(what, work, program, (prompt, flash, prebuilt), (model, exact), without)
                turned, lost = turned + counts[0], lost + counts[1]
    if lost > MOST_LOST:
        fail(f"{lost} tokens are neither ggml-cpu's nor those in F32, at most {MOST_LOST} may be")
    say(f"{turned} tokens are other ones than ggml-cpu's, whose rounding is larger than its margin there; {lost} of them are not "
        "those in F32 either")
    check_limits(program, work / "models" / "llama-f32.gguf", prebuilt)


def compare_tokens(what, work, program, case, models, without):
    """How many tokens of the device are not ggml-cpu's, and how many are not those in F32 either. All runs go on with the
    tokens of ggml-cpu, so that every step compares the same choice. Ends the program where one differs without an excuse."""
    model, exact = models
    prompt, flash, prebuilt = case
    follow, file = work / "tokens.txt", work / "logits"

    def tokens_of(path, flash, *more, **options):
        text = run(program, path, prompt, TOKENS, flash, prebuilt, "--logits", file, *more, **options)
        tokens, margins = (line.split() for line in text.strip().split("\n"))
        logits = array.array("f", file.read_bytes())
        if len(tokens) != TOKENS or len(logits) == 0 or len(logits) % TOKENS != 0:
            fail(f"{what}: {len(tokens)} tokens, {len(logits)} logits")
        return tokens, [float(margin) for margin in margins], logits

    tokens, margins, cpu = tokens_of(model, flash, env=without)
    follow.write_text(" ".join(tokens))
    # For flash attention llama.cpp makes F16 of a cache in F32.
    exact_tokens, exact_margins, measure = tokens_of(exact, "0", "--f32-cache", "--follow", follow, env=without)
    with_f32_cache = [model, "0", "--f32-cache", "--follow", follow, "--device", "NVB0"]
    f32_tokens, _, f32 = tokens_of(*with_f32_cache, env={**os.environ, "NVB_GGML_REFUSE": "GLU"})
    _, _, of_glu = tokens_of(*with_f32_cache)
    others, _, device = tokens_of(model, flash, "--follow", follow, "--device", "NVB0")
    distance = lambda values: max(abs(one - other) for one, other in zip(values, measure))
    of_cpu, of_device, of_f32, of_glu = distance(cpu), distance(device), distance(f32), distance(of_glu)
    turned = [step for step in range(TOKENS) if others[step] != tokens[step]]
    lost = [step for step in turned if others[step] != exact_tokens[step]]
    say(f"{what}: logits from those in F32: ggml-cpu's {of_cpu:.2g}, ours {of_device:.2g}, with a cache in F32 {of_f32:.2g} ({of_glu:.2g} with our GLU)"
        + "".join(f"; step {step} differs (margin {margins[step]:.2g}; in F32 {'another' if step in lost else 'ours'})"
                  for step in turned))
    if not of_f32 <= NEAREST[model.name.split("-")[0]]:
        fail(f"{what}: with a cache in F32 the logits are {of_f32} from those of ggml-cpu in F32")
    for step in range(TOKENS):
        if f32_tokens[step] != exact_tokens[step] and not exact_margins[step] <= 2 * of_f32:
            fail(f"{what}: with a cache in F32 step {step} is another token, with a margin of {exact_margins[step]}")
    if not of_device <= of_cpu + of_glu:
        fail(f"{what}: the logits are {of_device} from those in F32, those of ggml-cpu {of_cpu}")
    for step in turned:
        # Two logits change by at most so much together.
        if not margins[step] <= 2 * of_cpu:
            fail(f"{what}: step {step} is another token, with a margin of {margins[step]}, above {2 * of_cpu}")
    return len(turned), len(lost)


def check_limits(program, model, prebuilt):
    """Too little memory, for the cache and for the graph's buffers, and a limit that is none: the host ends by itself."""
    for limit, text in [("2MiB", "failed to allocate buffer for kv cache"), ("12MiB", "failed to allocate compute"),
                        ("nonsense", "no such device")]:
        done = subprocess.run([str(part) for part in (program, model, 40, 4, 0, prebuilt, "--device", "NVB0")], capture_output=True,
                              text=True, env={**os.environ, "NVB_GGML_MEMORY_LIMIT": limit})
        if done.returncode != 1 or text not in done.stderr or "nvbackend: " not in done.stderr:
            fail(f"a limit of {limit}: {done.returncode}\n{done.stderr}")
    say("a model larger than the limit ends in the host's own error")


def main():
    if sys.argv[2:] == ["--fetch"]:
        Packages(pathlib.Path(sys.argv[1]).resolve()).source(*HOST)
        return
    work, library, plugin = (pathlib.Path(argument).resolve() for argument in sys.argv[1:4])
    sample = "--sample" in sys.argv
    work.mkdir(parents=True, exist_ok=True)
    os.environ.update({"GGML_BACKEND_PATH": str(plugin), "NVB_GGML_CPU": "1", "LD_LIBRARY_PATH": str(library)})
    needed = run("readelf", "-d", plugin)
    if re.search(r"NEEDED.*ggml", needed):
        fail(f"the plug-in needs a library of ggml:\n{needed}")
    packages = Packages(work)
    check_refusals(work, plugin)
    if not sample:
        check_layouts(packages)
        for (name, version), pattern in WHEELS:
            ggml = next(packages.wheel(name, version).glob(pattern))
            say(run(sys.executable, HERE / "load.py", ggml, plugin).strip() + f" ({name} {version})")
    binaries = build_host(work, packages.source(*HOST))
    say(run(sys.executable, HERE / "load.py", binaries / "libggml.so", plugin).strip())
    check_programs(work, packages.source(*HOST), binaries, library, plugin)
    check_operations(binaries, sample)
    if not sample:
        check_threads(work, packages.source(*HOST), binaries, library)
        check_old_host(work, packages, plugin)
        check_architectures(build_llama(work, packages.source(*HOST)))
        check_models(work, packages)


if __name__ == "__main__":
    main()
