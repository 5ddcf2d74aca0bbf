#!/bin/bash
# Runs the quick starts as a newcomer does: the two blocks of README.md, and those of docs/index.md. It prints PASS,
# FAIL or SKIP and the time of each step, and the time of each command.
#
#   quickstart.sh [FOLDER]
#
# FOLDER (default: TMPDIR, or /tmp) needs free space for the model, twice. It runs in the bundle that `make gpu-bundle`
# makes, or in a checkout after `make build`, without a network. It needs /dev/fuse, root or fusermount3, and Python
# with PyTorch (on emulated devices: with NumPy). Variables:
#
#   GPUS=auto     devices of the mounts: auto uses all GPUs, and fails without one; emulated:1 is a trial without a GPU
#   PYTHON=PATH   the Python; the default is python3
#   MIB=1024      the size of the model
#
# The exit status is 1 if a step failed.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
case ${1:-} in -*)
	sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
	exit 2
	;;
esac
die() {
	echo "quickstart.sh: $*" >&2
	exit 1
}
root=$(cd "$here/../../.." && pwd)
programs=$root/build
[ -x "$root/../gaiafs" ] && programs=$(cd "$root/.." && pwd) # the bundle
[ -x "$programs/gaiafs" ] || die "there is no $programs/gaiafs: run this in a bundle, or after make build"
gpus=${GPUS:-auto} mib=${MIB:-1024}
python=$(command -v "${PYTHON:-python3}") || die "${PYTHON:-python3} is not installed"
python=$(realpath -s "$python") # -s: a link in a virtual environment
needed=torch
[[ $gpus != emulated* ]] || needed=numpy
"$python" -c "import $needed" 2>/dev/null || die "$python has no $needed: name another one with PYTHON"

work=$(mktemp -d "${1:-${TMPDIR:-/tmp}}/gaiafs-quickstart.XXXXXX") || exit
unmount() { # what a failed step left
	local m
	for m in models data; do
		! mountpoint -q "$work/mnt/$m" || "$programs/gaiafs" umount --force "$work/mnt/$m"
	done
}
cleanup() {
	unmount
	rm -rf --one-file-system "$work"
}
trap cleanup EXIT
mkdir -p "$work"/{bin,build,home/models,home/data,mnt/models,mnt/data,site}
# The blocks call build/gaiafs, gaiafs and python3.
ln -s "$programs/gaiafs" "$work/build/gaiafs"
ln -s "$programs/gaiafs" "$work/bin/gaiafs"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" >"$work/bin/python3"
chmod +x "$work/bin/python3"
export HOME=$work/home PATH=$work/bin:$PATH PYTHONDONTWRITEBYTECODE=1 GAIAFS_GPUS=$gpus
cd "$work" || exit

failed=0
now() { echo "${EPOCHREALTIME/[.,]/}"; } # microseconds
# say PASS|FAIL|SKIP NAME [MICROSECONDS]
say() {
	printf '%s  %-62s' "$1" "$2"
	[ -z "${3:-}" ] || printf ' %9.3f s' "$(awk "BEGIN {print $3 / 1e6}")"
	printf '\n'
	[ "$1" != FAIL ] || failed=$((failed + 1))
}
# times prints the commands of a trace, each with the time until the next one began.
times() { # TRACE END
	{
		sed -nE 's/^\+ ([0-9]+)[.,]([0-9]+) /\1\2 /p' "$1"
		echo "$2 "
	} | awk 'NR > 1 && text !~ /^echo / {printf "      %9.3f s  %s\n", ($1 - at) / 1e6, substr(text, 1, 90)}
		{at = $1; text = substr($0, index($0, " ") + 1)}'
}
# step NAME EXPECTED SCRIPT: runs a script of bash. Its output must match each line of EXPECTED, a regular expression.
step() {
	local begin end want ok=PASS
	begin=$(now)
	# Root's bash takes no PS4 from the environment.
	timeout --foreground 600 bash -eu -o pipefail -c "PS4='+ \$EPOCHREALTIME '; BASH_XTRACEFD=9; set -x; $3" \
		>out 2>&1 9>trace </dev/null || ok=FAIL
	end=$(now)
	while read -r want; do
		[ -z "$want" ] || grep -Eq -- "$want" out || { ok=FAIL; echo "no line matches: $want" >>out; }
	done <<<"$2"
	say $ok "$1" $((end - begin))
	times trace "$end"
	sed 's/^/      | /' out
	[ $ok = PASS ] || unmount >/dev/null 2>&1
}
# blocks PAGE FROM TO: the blocks of a page that its test runs, between two lines, with the folders of this run. A block
# of Python becomes a here-document.
blocks() {
	awk -v from="$2" -v to="$3" '
		$0 ~ from {on = 1}
		to != "" && $0 ~ to {on = 0}
		!on {next}
		/^<!-- run -->$/ {marked = 1; next}
		marked && /^```/ {inside = 1; marked = 0; python = /python/; if (python) print "python3 - <<'\''PYTHON'\''"; next}
		inside && /^```$/ {if (python) print "PYTHON"; inside = 0}
		inside {print}' "$root/$1" | sed "s|/mnt/|$work/mnt/|g"
}

"$programs/gaiafs" version | tee versions
! nvidia-smi -L 2>/dev/null || true
echo
step "gaiafs doctor" '^ok +fuse' 'gaiafs doctor --dir . || true'

# The model: tensors of 16 MiB, and the rest of a page.
begin=$(now)
"$python" - "$HOME/models/model.safetensors" "$mib" <<'END' || die "the model cannot be written"
import json, os, struct, sys
size, header, at = 16 << 20, {}, 0
for i in range(max(int(sys.argv[2]) // 16, 1)):
    header[f"layers.{i}.weight"] = {"dtype": "F32", "shape": [size // 4096 // 4, 4096], "data_offsets": [at, at + size]}
    at += size
text = json.dumps(header).encode()
block = b"".join(struct.pack("<f", i % 251 / 251) for i in range(size // 4))
with open(sys.argv[1], "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for i in range(len(header)):
        f.write(struct.pack("<f", i) + block[4:])
    f.flush()
    os.fsync(f.fileno())
END
say PASS "a model of $mib MiB is written" $(($(now) - begin))

# make build && pip install ./client/python, as README says. The bundle is built already.
if "$python" -c 'import setuptools, pip, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null &&
	command -v make >/dev/null && command -v cc >/dev/null; then
	cp -r "$root/client" "$work/client"
	step "pip install ./client/python" '' \
		'python3 -m pip install -q --no-index --no-deps --no-build-isolation --target site ./client/python'
fi
if [ -e site/gaiafs ]; then
	export PYTHONPATH=$work/site
else
	say SKIP "pip install ./client/python: it needs pip, setuptools 77, make and cc"
	export PYTHONPATH=$root/client/python GAIAFS_LIBRARY=$programs/libgaiafs.so.0
fi

# The line of a mount names devices, and their kind unless they are GPUs.
tensors=$((mib / 16)) device='^ +(gpu0 +.* current|view +on gpu0)' mounted=' shows [^;]*: gpu0 [(]'
[[ $gpus != emulated* ]] || mounted='emulated devices, as --gpus says: gpu0 [(]'
step "README: share a model" "$mounted
^$tensors tensors, $((tensors << 24)) bytes$
$device" "$(blocks README.md '^## Share a model' '^## Write together')"
step "README: write together" "$mounted"'
^from the CPU$
^from the GPU$
"merged_pages": 1,?$' "$(blocks README.md '^## Write together' '^## What programs may rely on')"
step "what both wrote is in the source" '^from the CPU$
^from the GPU$' "tr -s '\\0' '\\n' <home/data/out"
step "docs/index.md: quick start" "$mounted
$device
^$tensors tensors$" "$(blocks docs/index.md '^# ' '')"

# What the pages say of a second process and of an unchanged program.
cat >loads.py <<'END'
import sys, time
import gaiafs
if gaiafs.status(sys.argv[2])["devices"][0]["kind"] == "cuda":
    import torch
    torch.zeros(1, device="cuda:0")  # starts CUDA
else:
    import numpy
begin = time.perf_counter()
weights = gaiafs.load_safetensors(sys.argv[1], device=0)
print(f"{(time.perf_counter() - begin) * 1e3:.1f} ms: {len(weights)} tensors", flush=True)
if len(sys.argv) > 3:  # the first process keeps the memory until the second has compared it
    sys.stdin.readline()
else:
    size = 16 << 20
    with open(sys.argv[1], "rb") as f:
        f.seek(8 + int.from_bytes(f.read(8), "little"))
        same = all(bytes(w.cpu().numpy() if hasattr(w, "cpu") else w) == f.read(size) for w in weights.values())
    print("compared with the file: the same" if same else "compared with the file: different")
END
step "a second process gets the same memory" "^second: .* $tensors tensors$
^compared with the file: the same$
^used by the device: the same$" "
	gaiafs mount --daemon ~/models mnt/models
	model=\$PWD/mnt/models/model.safetensors
	used() { gaiafs status --json mnt/models | grep -m 1 used_bytes; }
	coproc python3 loads.py \"\$model\" mnt/models wait
	read -r first <&\${COPROC[0]}
	one=\$(used)
	echo \"second: \$(python3 loads.py \"\$model\" mnt/models)\"
	[ \"\$one\" != \"\$(used)\" ] || echo 'used by the device: the same'
	echo \"first: \$first\"
	echo >&\${COPROC[1]}
	wait
	gaiafs warm --device 0 \"\$model\"
	gaiafs warm --verify --device 0 \"\$model\"
	gaiafs umount mnt/models"

library=torch
[[ $gpus != emulated* ]] || library=numpy
if "$python" -c "import safetensors.$library" 2>/dev/null; then
	cat >serve.py <<END
import sys, time
from safetensors.$library import load_file
arguments = {} if "$library" == "numpy" else {"device": "cuda:0"}
if arguments:
    import torch
    torch.zeros(1, device="cuda:0")  # starts CUDA
begin = time.perf_counter()
weights = load_file(sys.argv[1], **arguments)
if arguments:
    torch.cuda.synchronize()
print(f"{(time.perf_counter() - begin) * 1e3:.1f} ms: {len(weights)} tensors")
END
	step "an unchanged program, with safetensors and with gaiafs run" "^safetensors: .* $tensors tensors$
^gaiafs run: .* $tensors tensors$" "
		cat ~/models/model.safetensors >/dev/null
		echo \"safetensors: \$(python3 serve.py ~/models/model.safetensors)\"
		gaiafs mount --daemon ~/models mnt/models
		echo \"gaiafs run: \$(python3 -m gaiafs run serve.py mnt/models/model.safetensors)\"
		gaiafs status --json mnt/models | grep -m 1 used_bytes | grep -v ': 0,'
		gaiafs umount mnt/models"
else
	say SKIP "an unchanged program: Python has no safetensors.$library"
fi
echo
[ $failed = 0 ] || echo "$failed steps failed"
[ $failed = 0 ]
