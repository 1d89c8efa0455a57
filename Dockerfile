# The planning service: no torch, an ordinary user, one SQLite file on the volume /data.
#   docker build -t commplan .
#   docker run -p 8000:8000 -e COMMPLAN_TOKEN=... -v commplan-data:/data commplan
# It holds python-hostlist, GPL-2.0-or-later: docs/decisions/0006 says what that means for who passes
# the image on.
# tests/test_container.py follows these steps without an engine; see docs/decisions/0001.
FROM python:3.11-slim-bookworm

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY planner planner
COPY executor executor
COPY api api
COPY topologies topologies
RUN pip install --no-cache-dir .

# A number, not a name: it needs no account and satisfies runAsNonRoot.
RUN mkdir -p /data && chown 10001:10001 /data
USER 10001:10001
WORKDIR /data
VOLUME /data

ENV PYTHONUNBUFFERED=1 \
    COMMPLAN_HOST=0.0.0.0 \
    COMMPLAN_PORT=8000 \
    COMMPLAN_DATA_DIR=/data
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['COMMPLAN_PORT'] + '/healthz', timeout=4)"]
ENTRYPOINT ["commplan", "serve"]
