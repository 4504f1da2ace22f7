# Sourced by build steps: indexes, proxies and certificates of the host, from build secrets, and where downloads are kept. Nothing of it
# is written anywhere.
export UV_CACHE_DIR=/opt/build/cache
if [ -f /run/secrets/network ]; then . /run/secrets/network; fi
if [ -s /run/secrets/ca ]; then
    export SSL_CERT_FILE=/run/secrets/ca PIP_CERT=/run/secrets/ca REQUESTS_CA_BUNDLE=/run/secrets/ca
fi
if [ -s /run/secrets/netrc ]; then export NETRC=/run/secrets/netrc; fi
if [ -s /run/secrets/uv ]; then export UV_CONFIG_FILE=/run/secrets/uv; fi
if [ -n "${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-}}" ]; then export PIP_INDEX_URL="${UV_DEFAULT_INDEX:-$UV_INDEX_URL}"; fi
if [ -n "${UV_INDEX:-${UV_EXTRA_INDEX_URL:-}}" ]; then export PIP_EXTRA_INDEX_URL="${UV_INDEX:-$UV_EXTRA_INDEX_URL}"; fi
