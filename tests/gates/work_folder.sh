# Read in by gates that empty a folder: makes "$work" an empty folder, and refuses one that no gate made, whose content
# would be lost.
if [ -e "$work" ] && [ ! -e "$work/made-by-a-gate" ]; then
  echo "$0: $work is there, and no gate made it" >&2
  exit 2
fi
rm -rf "$work"
mkdir -p "$work"
: >"$work/made-by-a-gate"
