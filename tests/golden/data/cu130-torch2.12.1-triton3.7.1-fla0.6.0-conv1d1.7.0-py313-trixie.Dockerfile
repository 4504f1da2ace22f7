# cu130-torch2.12.1-triton3.7.1-fla0.6.0-conv1d1.7.0-py313-trixie: rendered from Dockerfile.j2 by `builder render`; not to be edited.
# Build arguments: EXTENSIONS is "compile" or "store" (a wheel that an earlier build made from the same inputs), GENCODE nvcc's
# target flags, JOBS parallel compilers, FINGERPRINT the kernel cache's name (the answer of the stage `fingerprint`).
ARG EXTENSIONS=compile

# ---- base: trixie
FROM scratch AS base
ADD rootfs.tar /
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    VIRTUAL_ENV=/opt/venv \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    SOURCE_DATE_EPOCH=1796095153
RUN --mount=type=bind,source=build/install,target=/opt/build/install sh /opt/build/install/python.sh 3.13

# ---- libraries: CUDA libraries, Triton and torch, each in a layer of its own
FROM base AS libraries
RUN --mount=type=secret,id=network --mount=type=secret,id=ca --mount=type=secret,id=netrc --mount=type=secret,id=uv \
    --mount=type=cache,id=blackwell-uv,target=/opt/build/cache \
    --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=layers/cuda,target=/opt/layer \
    . /opt/build/install/network.sh && sh /opt/build/install/install.sh /opt/layer
RUN --mount=type=secret,id=network --mount=type=secret,id=ca --mount=type=secret,id=netrc --mount=type=secret,id=uv \
    --mount=type=cache,id=blackwell-uv,target=/opt/build/cache \
    --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=layers/cudnn,target=/opt/layer \
    . /opt/build/install/network.sh && sh /opt/build/install/install.sh /opt/layer
RUN --mount=type=secret,id=network --mount=type=secret,id=ca --mount=type=secret,id=netrc --mount=type=secret,id=uv \
    --mount=type=cache,id=blackwell-uv,target=/opt/build/cache \
    --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=layers/triton,target=/opt/layer \
    . /opt/build/install/network.sh && sh /opt/build/install/install.sh /opt/layer
RUN --mount=type=secret,id=network --mount=type=secret,id=ca --mount=type=secret,id=netrc --mount=type=secret,id=uv \
    --mount=type=cache,id=blackwell-uv,target=/opt/build/cache \
    --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=layers/torch,target=/opt/layer \
    . /opt/build/install/network.sh && sh /opt/build/install/install.sh /opt/layer
# ---- extensions: the CUDA compiler lives here only; wheels come out
FROM libraries AS extensions-compile
RUN --mount=type=secret,id=network --mount=type=secret,id=ca --mount=type=secret,id=netrc --mount=type=secret,id=uv \
    --mount=type=cache,id=blackwell-uv,target=/opt/build/cache \
    --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=layers/compiler,target=/opt/layer \
    . /opt/build/install/network.sh && sh /opt/build/install/install.sh /opt/layer
ARG GENCODE
ARG JOBS
RUN --mount=type=secret,id=network --mount=type=secret,id=ca --mount=type=secret,id=netrc --mount=type=secret,id=uv \
    --mount=type=cache,id=blackwell-uv,target=/opt/build/cache \
    --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=build/extensions,target=/opt/build/extensions \
    --mount=type=bind,source=layers/extensions,target=/opt/layer \
    . /opt/build/install/network.sh && GENCODE="$GENCODE" JOBS="$JOBS" sh /opt/build/extensions/extensions.sh /opt/layer /wheels

FROM scratch AS extensions-wheels
COPY --from=extensions-compile /wheels/ /

FROM scratch AS wheels-compile
COPY --from=extensions-compile /wheels/ /wheels/

FROM scratch AS wheels-store
COPY wheels/ /wheels/

FROM wheels-${EXTENSIONS} AS wheels
# ---- runtime
FROM libraries AS runtime
RUN --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=build/extensions,target=/opt/build/extensions \
    --mount=type=bind,from=wheels,source=/wheels,target=/opt/wheels \
    sh /opt/build/extensions/wheels.sh /opt/wheels
RUN --mount=type=secret,id=network --mount=type=secret,id=ca --mount=type=secret,id=netrc --mount=type=secret,id=uv \
    --mount=type=cache,id=blackwell-uv,target=/opt/build/cache \
    --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=layers/python,target=/opt/layer \
    . /opt/build/install/network.sh && sh /opt/build/install/install.sh /opt/layer
RUN --mount=type=secret,id=network --mount=type=secret,id=ca --mount=type=secret,id=netrc --mount=type=secret,id=uv \
    --mount=type=cache,id=blackwell-uv,target=/opt/build/cache \
    --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=layers/fla,target=/opt/layer \
    . /opt/build/install/network.sh && sh /opt/build/install/install.sh /opt/layer
# ---- fingerprint: the name of the kernel cache, from what the libraries stage really holds
FROM libraries AS fingerprint-made
COPY inside/blackwell /opt/fingerprint/blackwell
RUN PYTHONPATH=/opt/fingerprint python -m blackwell.fingerprint --capability 10.0 --capability 10.3 --capability 12.0 --capability 12.1  > /fingerprint

FROM scratch AS fingerprint
COPY --from=fingerprint-made /fingerprint /fingerprint

# ---- null GPU: stand-ins for the CUDA libraries, compiled against this torch's own headers and export lists
FROM libraries AS nullgpu
COPY inside/nullgpu /opt/blackwell/inside/nullgpu
RUN python /opt/blackwell/inside/nullgpu/build.py --site /opt/venv/lib/python3.13/site-packages --out /opt/blackwell/nullgpu/lib

# ---- inside: our own commands, facts and constraints; the environment that warming and jobs share.
# VEC_ISA_OK and CPU_CAPABILITY are in Inductor's key: without them a machine with another processor, or without a compiler, misses.
FROM runtime AS inside
COPY --from=nullgpu /opt/blackwell/nullgpu /opt/blackwell/nullgpu
COPY inside/blackwell /opt/blackwell/inside/blackwell
COPY inside/entrypoint /opt/blackwell/entrypoint
COPY facts/ /opt/blackwell/
RUN --mount=type=bind,source=build/install,target=/opt/build/install \
    --mount=type=bind,source=build/finish,target=/opt/build/finish \
    sh /opt/build/finish/finish.sh
ARG FINGERPRINT
ENV BLACKWELL_CACHE=/opt/blackwell/cache/${FINGERPRINT} \
    TRITON_CACHE_DIR=/opt/blackwell/cache/${FINGERPRINT}/triton \
    TORCHINDUCTOR_CACHE_DIR=/opt/blackwell/cache/${FINGERPRINT}/inductor \
    FLA_TILELANG=0 \
    TRITON_CACHE_AUTOTUNING=1 \
    TORCHINDUCTOR_VEC_ISA_OK=1 \
    ATEN_CPU_CAPABILITY=avx2 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PIP_CONSTRAINT=/opt/blackwell/constraints.txt \
    UV_CONSTRAINT=/opt/blackwell/constraints.txt

# ---- warm: fill the kernel caches under the null GPU, for every card and capability of the image
FROM inside AS warm
RUN blackwell warm --image

# ---- report: what the host must know of the image before it is tagged
FROM scratch AS report
COPY --from=warm /opt/blackwell/cache/summary.json /summary.json

# ---- final
FROM inside AS final
COPY --from=warm /opt/blackwell/cache /opt/blackwell/cache
ENTRYPOINT ["/opt/blackwell/entrypoint"]
