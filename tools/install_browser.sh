#!/bin/sh
# Installs the browser that tests marked "browser" look at pages with: Debian's and Ubuntu's Chromium.
# Needs root (or sudo) and the distribution's package servers; about 350 MB. Changes nothing when a
# browser is there already.
set -eu

for name in chromium chromium-browser google-chrome-stable google-chrome; do
    if command -v "$name" >/dev/null; then
        echo "found $(command -v "$name")"
        exit 0
    fi
done
if ! command -v apt-get >/dev/null; then
    echo "install_browser.sh: there is no apt-get here: install Chromium in another way" >&2
    exit 1
fi
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo"
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get -q update
$as_root apt-get -q install -y --no-install-recommends chromium fonts-dejavu-core
chromium --version
