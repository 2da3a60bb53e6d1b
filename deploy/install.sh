#!/bin/sh
# Installs ftis-node for one user on Linux: a virtual environment of its own, and one link to its command.
# It says first what it will do, and asks. Run again, it upgrades. Nothing here needs root.
set -eu

usage() {
  cat <<TEXT
Usage: install.sh [--from SOURCE] [--dir DIR] [--bin DIR] [--extras NAMES] [--yes] [--dry-run] [--uninstall]

  --from SOURCE   a checkout, a wheel, or what pip understands (default: the checkout that this script lies in)
  --dir DIR       where the environment goes (default: ~/.local/share/ftis-node)
  --bin DIR       where the link ftis-node goes (default: ~/.local/bin)
  --extras NAMES  extras, with commas (default: gpu where there is an NVIDIA driver, else none)
  --yes           do not ask
  --dry-run       only say what would be done
  --uninstall     remove environment and link; homes of nodes (~/.ftis-node) stay
TEXT
}

fail() {
  printf 'error: %s\n       %s\n' "$1" "$2" >&2
  exit 1
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
source=$(dirname -- "$here")
dir=${XDG_DATA_HOME:-$HOME/.local/share}/ftis-node
bin=$HOME/.local/bin
extras=auto
yes='' dry='' uninstall=''
while [ $# -gt 0 ]; do
  case $1 in
    --from | --dir | --bin | --extras)
      [ $# -gt 1 ] || fail "$1 needs a value." "See install.sh --help."
      case $1 in --from) source=$2 ;; --dir) dir=$2 ;; --bin) bin=$2 ;; --extras) extras=$2 ;; esac
      shift ;;
    --yes) yes=1 ;;
    --dry-run) dry=1 ;;
    --uninstall) uninstall=1 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "There is no option $1." "Leave it out." ;;
  esac
  shift
done
case $dir in /*) ;; *) dir=$PWD/$dir ;; esac # where the link leads, from wherever it lies
link=$bin/ftis-node

confirm() {
  [ -z "$dry" ] || exit 0
  [ -z "$yes" ] || return 0
  [ -t 0 ] || fail "There is no terminal to ask." "Give --yes if that is what you want."
  printf 'Go on? [y/N] '
  read -r answer
  case $answer in y | Y | yes) ;; *) exit 1 ;; esac
}

owned() { # the link, if it is ours
  [ -L "$link" ] && [ "$(readlink "$link")" = "$dir/bin/ftis-node" ]
}

if [ -n "$uninstall" ]; then
  [ -e "$dir/.ftis-node-environment" ] || fail "$dir is no environment of this script." "Name it with --dir."
  printf 'This removes %s' "$dir"
  ! owned || printf ' and the link %s' "$link"
  printf '. Homes of nodes stay.\n'
  confirm
  ! owned || rm "$link"
  rm -rf "$dir"
  exit 0
fi

[ "$(uname -s)" = Linux ] || fail "This is $(uname -s); hivemind's network daemon is for Linux only." "Take WSL2 or Docker: docs/deploy.md."
[ "$(uname -m)" = x86_64 ] || fail "This is $(uname -m); hivemind's network daemon is for x86-64 only." "Take Docker: docs/deploy.md."

python=''
for name in python3.13 python3.12 python3.11 python3; do
  if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$name
    break
  fi
done
[ -n "$python" ] || fail "There is no Python of version 3.11 or newer." "Install one: apt-get install python3 python3-venv, or dnf install python3.12."
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make virtual environments." "Install what is missing: apt-get install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')."

cuda=''
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then cuda=1; fi
if [ "$extras" = auto ]; then extras=${cuda:+gpu}; fi
constraints=''
[ ! -f "$source/constraints.txt" ] || constraints=$source/constraints.txt
[ -z "$constraints" ] && [ -f "$here/../constraints.txt" ] && constraints=$here/../constraints.txt
[ ! -e "$source" ] || source=$(cd -- "$(dirname -- "$source")" && pwd)/$(basename -- "$source") # pip takes a bare name for an index's
case $source in /* | ./* | ../*) [ -e "$source" ] || fail "There is nothing at $source." "Name a checkout or a wheel with --from." ;; esac
wanted=$source${extras:+[$extras]}
if [ -n "$extras" ] && [ ! -e "$source" ]; then
  case $source in
    *://*) wanted="ftis-node[$extras] @ ${source#*@ }" ;;
    ftis-node*) wanted="ftis-node[$extras]${source#ftis-node}" ;;
  esac
fi
if [ -e "$dir" ] && [ ! -e "$dir/.ftis-node-environment" ]; then
  [ -z "$(ls -A "$dir")" ] || fail "$dir is there already and not of this script." "Name another --dir."
fi
if [ -e "$link" ] || [ -L "$link" ]; then owned || fail "$link is there already and leads elsewhere." "Name another --bin."; fi

verb=installs
[ ! -e "$dir/.ftis-node-environment" ] || verb=upgrades
echo "This $verb ftis-node for $(id -un):"
echo "  from         $wanted"
echo "  Python       $(command -v "$python") ($("$python" -c 'import platform; print(platform.python_version())'))"
if [ -n "$cuda" ]; then
  echo "  PyTorch      with CUDA, as pip brings it: downloads of some 4 GB, 8 GB on the disk"
else
  echo "  PyTorch      as pip brings it; no NVIDIA driver was found. To save gigabytes, point pip at PyTorch's index of"
  echo "               CPU wheels first (PIP_EXTRA_INDEX_URL); 2 GB on the disk then"
fi
echo "  writes       $dir (the environment), $link (a link), pip's cache"
[ "$(id -u)" != 0 ] || echo "note: this is root; a service has a user of its own (docs/deploy.md)."
confirm

mkdir -p "$dir" "$bin"
touch "$dir/.ftis-node-environment"
[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
set -- --disable-pip-version-check --upgrade
[ -z "$constraints" ] || set -- "$@" -c "$constraints"
"$dir/bin/python" -m pip install "$@" "$wanted" || fail "pip could not install it." "Its last lines say why. Run this again: what was downloaded is kept."
ln -sfn "$dir/bin/ftis-node" "$link"
echo "Installed: $("$link" --version). Next: ftis-node doctor"
case :$PATH: in *":$bin:"*) ;; *) echo "note: $bin is not in PATH; add it, or write $link." ;; esac
