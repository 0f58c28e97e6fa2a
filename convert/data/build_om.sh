#!/usr/bin/env bash
# Compile the graphs of @NAME@ for @TARGET@.
# Written by `convert-moss atc --script`; needs bash, coreutils and atc, no Python package of the project.
#
#   build_om.sh [ARTIFACTS_DIRECTORY]
#
# What is already compiled from the same inputs is skipped, so after a failure run it again. Each .om gets a record
# beside it; `convert-moss atc ARTIFACTS --adopt` takes the records into the manifest.
set -euo pipefail
shopt -s nullglob

say() { printf '%s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}
sha256() {
    local line
    line=$(sha256sum -- "$1")
    printf '%s' "${line%% *}"
}

artifacts=${1:-$(dirname -- "${BASH_SOURCE[0]}")/@RELATIVE@}
[[ -d $artifacts ]] || die "$artifacts is no directory; give the artifacts directory as the argument"
artifacts=$(cd -- "$artifacts" && pwd -P)
plain=$(LC_ALL=C && printf '%s' "${artifacts//[^ -~]/}") # Chinese characters are taken
[[ $plain =~ ^[A-Za-z0-9_./-]+$ ]] || die "$artifacts: ATC takes letters, digits, _ - . / in paths; move the directory"
out="$artifacts/@OUT@"
timeout_s=${TIMEOUT_S:-3600}

# --- the machine -----------------------------------------------------------------------------------------------------
command -v atc >/dev/null || die "atc is not on PATH; first source /usr/local/Ascend/cann/set_env.sh (CANN 8.5 and" \
    "later) or /usr/local/Ascend/ascend-toolkit/set_env.sh"
[[ -n ${ASCEND_OPP_PATH:-} ]] || die "ASCEND_OPP_PATH is not set; source the set_env.sh of CANN first"
[[ -d $ASCEND_OPP_PATH/built-in/op_impl/ai_core/tbe/config/@OPS@ ]] ||
    die "no ops package for @SOC@: $ASCEND_OPP_PATH/built-in/op_impl/ai_core/tbe/config/@OPS@ is missing"

# first_value PATTERN FILE...: what PATTERN's group catches in the first line that matches.
first_value() {
    local pattern=$1 file line
    shift
    for file in "$@"; do
        [[ -r $file ]] || continue
        while IFS= read -r line || [[ -n $line ]]; do
            if [[ $line =~ $pattern ]]; then
                printf '%s' "${BASH_REMATCH[1]}"
                return
            fi
        done <"$file"
    done
}
home=${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-}}
cann=$(first_value '^version=([A-Za-z0-9._-]+)' "$home"/*-linux/ascend_toolkit_install.info)
[[ -n $cann ]] || cann=$(first_value '^version_dir=([A-Za-z0-9._-]+)' "$home"/{compiler,opp,runtime,toolkit}/version.info)
cann=${cann#cann-}
cann=${cann:-unknown}
atc_path=$(readlink -f -- "$(command -v atc)")
host="$(uname -s) $(uname -m)"

# --- what goes in ----------------------------------------------------------------------------------------------------
check_input() {
    [[ -f $artifacts/$2 ]] || die "$artifacts/$2 is missing; copy the whole artifacts directory"
    [[ $(sha256 "$artifacts/$2") == "$1" ]] || die "$artifacts/$2 is not the file that this script was written for"
}
@INPUTS@
mkdir -p -- "$out"
@FILES@

# --- one graph -------------------------------------------------------------------------------------------------------
# In the background, because timeout(1) has a process group of its own, which Ctrl-C does not reach.
child=''
trap '[[ -z $child ]] || kill "$child"; say "interrupted; run the script again to go on"; exit 130' INT TERM
total=@TOTAL@
number=0
built=()
unchanged=()
failed=()

# build NAME GRAPH AXES_JSON INPUTS_JSON RECIPE ATC_ARGUMENT...
build() {
    local name=$1 graph=$2 axes=$3 inputs=$4 recipe=$5
    shift 5
    local om="$out/$name.om" record="$out/$name.om.json" log="$out/$name.atc.log" scratch="$out/building/$name"
    local status=0 start=$SECONDS text file files=()
    number=$((number + 1))
    if [[ -s $om && -r $record ]]; then
        text=$(<"$record")
        if [[ $text == *"\"recipe\": \"$recipe\""* && $text == *"\"versions\": {\"cann\": \"$cann\""* &&
            $text == *"\"sha256\": \"$(sha256 "$om")\""* ]]; then
            say "[$number/$total] $name: unchanged"
            unchanged+=("$name")
            return
        fi
    fi
    say "[$number/$total] $name: compiling; output goes to $log"
    rm -rf -- "$scratch"
    mkdir -p -- "$scratch/plog"
    (cd -- "$scratch" && ASCEND_PROCESS_LOG_PATH="$scratch/plog" exec timeout -k 10 "$timeout_s" atc "$@") \
        >"$log" 2>&1 </dev/null &
    child=$!
    wait "$child" || status=$?
    child=''
    for file in "$scratch/$name"*.om; do # a suffix such as _linux_aarch64 is possible
        [[ -s $file ]] && files+=("$file")
    done
    text=$(<"$log")
    if [[ $status -ne 0 || $text != *"ATC run success"* || ${#files[@]} -ne 1 ]]; then
        explain "$name" "$status" "${#files[@]}" "$log"
        rm -rf -- "$out/$name.atc.plog"
        [[ -n $(find_any "$scratch/plog") ]] && mv -- "$scratch/plog" "$out/$name.atc.plog"
        rm -rf -- "$scratch"
        failed+=("$name")
        return
    fi
    rm -f -- "$record"
    mv -f -- "${files[0]}" "$om"
    write_record "$name" "$graph" "$axes" "$inputs" "$recipe" "$((SECONDS - start))" "$@" >"$record.part"
    mv -f -- "$record.part" "$record"
    rm -rf -- "$scratch" "$out/$name.atc.plog"
    say "[$number/$total] $name: done in $((SECONDS - start)) s"
    built+=("$name")
}

find_any() {
    local file
    for file in "$1"/* "$1"/*/* "$1"/*/*/*; do
        [[ -f $file ]] && printf '%s' "$file" && return
    done
    return 0
}

# The fields of runtime.manifest.OmBuild.
write_record() {
    local name=$1 graph=$2 axes=$3 inputs=$4 recipe=$5 seconds=$6 om="$out/$1.om" argument argv='"atc"'
    shift 6
    for argument in "$@"; do argv+=", \"$argument\""; done
    printf '{\n "graph": "%s",\n "axes": %s,\n "soc_version": "%s",\n "cann": "%s",\n "precision": "%s",\n' \
        "$graph" "$axes" '@SOC@' '@CANN@' '@PRECISION@'
    printf ' "file": "%s",\n "sha256": "%s",\n "num_bytes": %s,\n "argv": [%s],\n "inputs": %s,\n "recipe": "%s",\n' \
        "@OUT@/$name.om" "$(sha256 "$om")" "$(stat -c %s -- "$om")" "$argv" "$inputs" "$recipe"
    printf ' "versions": {"cann": "%s", "atc": "%s", "host": "%s"},\n "log": "%s",\n "seconds": %s\n}\n' \
        "$cann" "$atc_path" "$host" "@OUT@/$name.atc.log" "$seconds"
}

# The first real error of a log; codes ??9999 and ??8888 usually only follow it.
explain() {
    local name=$1 status=$2 num_files=$3 log=$4 line code first='' inner=''
    say "[$number/$total] $name: FAILED (status $status, $num_files .om files)"
    while IFS= read -r line; do
        [[ $line =~ ^[[:space:]]*(E[A-Z0-9][0-9]{4})(:|\[) || $line =~ \((E[A-Z0-9][0-9]{4})\): ]] || continue
        code=${BASH_REMATCH[1]}
        if [[ $code == ??9999 || $code == ??8888 ]]; then
            inner=${inner:-$line}
        else
            first=${first:-$line}
        fi
    done <"$log"
    [[ -z ${first:-$inner} ]] || say "    ${first:-$inner}"
    case $status in
        124) say "    it did not end within $timeout_s s; TIMEOUT_S=14400 gives it more time" ;;
        137) say "    it was killed, most likely for lack of memory; try TE_PARALLEL_COMPILER=1" ;;
    esac
    say "    convert-moss atc $artifacts --target @TARGET@ --explain $log says more"
}

# --- the graphs ------------------------------------------------------------------------------------------------------
@BUILDS@
# --- the summary -----------------------------------------------------------------------------------------------------
rmdir -- "$out/building" 2>/dev/null || true
printf 'compiled %s, unchanged %s, failed %s of %s for %s with CANN %s\n' \
    "${#built[@]}" "${#unchanged[@]}" "${#failed[@]}" "$total" '@SOC@' "$cann"
for name in ${built[@]+"${built[@]}"} ${unchanged[@]+"${unchanged[@]}"}; do
    printf '%s  %s\n' "$(sha256 "$out/$name.om")" "$out/$name.om"
done
if [[ ${#failed[@]} -gt 0 ]]; then
    printf 'FAILED  %s\n' "${failed[@]}"
    exit 1
fi
