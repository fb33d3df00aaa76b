# For the benches that are shell scripts: figures as rows of a CSV file, dev/bench/*.csv. Sourced without
# arguments, it takes "--csv FILE" out of those of the script. Then
#   figure MACHINE OP SHAPE VALUE UNIT
# appends the row date,commit,machine,op,shape,value,unit,command when there was a --csv; command: the script
# and its other arguments.

figures_file='' figures_rest=()
figures_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
figures_command=dev/bench/$(basename "$0")
while (($#)); do
    if [[ $1 == --csv ]]; then
        (($# >= 2)) || { echo "$(basename "$0"): --csv needs the name of a file" >&2; exit 2; }
        figures_file=$(realpath -m -- "$2")
        shift 2
        continue
    fi
    figures_rest+=("$1")
    figures_command+=" $1"
    shift
done
set -- "${figures_rest[@]}"

figures_commit() { # the first digits, with a "+" for changes that are not in it
    local id
    id=$(git -C "$figures_folder" rev-parse --short=7 HEAD 2>/dev/null) || { echo unknown; return; }
    [[ -z $(git -C "$figures_folder" status --porcelain --untracked-files=no 2>/dev/null) ]] || id+=+
    echo "$id"
}

figure() {
    [[ -n $figures_file ]] || return 0
    local row='' field
    [[ -s $figures_file ]] || echo date,commit,machine,op,shape,value,unit,command >>"$figures_file"
    for field in "$(date -u +%F)" "$(figures_commit)" "$@" "$figures_command"; do
        field=${field//[[:cntrl:]]/ }
        if [[ $field == *[,\"]* ]]; then field="\"${field//\"/\"\"}\""; fi
        row+=,$field
    done
    printf '%s\n' "${row#,}" >>"$figures_file"
}

gpu_machine() { # COUNT: so many of the GPUs that are here
    echo "$1 x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"
}

cpu_machine() { # the cores that a bench uses, and whose they are
    echo "$(nproc) cores of $(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)"
}
