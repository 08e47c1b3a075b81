#!/bin/sh
# Makes sure that Chromium and its driver are there; installs Debian's packages if this is root.
set -u
found() { command -v chromium >/dev/null 2>&1 && command -v chromedriver >/dev/null 2>&1; }
found && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "tools/chromium.sh: installing chromium and chromium-driver"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update >/dev/null 2>&1
    apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null 2>&1
fi
found
