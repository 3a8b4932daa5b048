"""A server of S3 on this machine, which tests start, stop, fill and slow down; and a client for it."""

from __future__ import annotations

import os
import threading
import time
import xml.etree.ElementTree as ET
from datetime import timedelta
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path

import fsspec
import localbucket
from obstore.fsspec import register

FAULTS = {
    "full": (HTTPStatus.INSUFFICIENT_STORAGE, "XMinioStorageFull"),
    "denied": (HTTPStatus.FORBIDDEN, "AccessDenied"),
}


class Handler(localbucket.S3Handler):
    """What localbucket lacks: deleting several objects at once, and faults."""

    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _put(self, bucket: str, key: str) -> None:
        self.server.put.append(key)
        fault, (slow, seconds) = self.server.fault, self.server.delay
        if slow and slow in key:
            time.sleep(seconds)
        if fault is not None:
            self._read_body()
            raise localbucket.S3Error(*FAULTS[fault], "injected")
        super()._put(bucket, key)

    def _get(self, bucket: str, key: str, include_body: bool) -> None:
        if include_body:
            self.server.got.append(key)
        super()._get(bucket, key, include_body)

    def _post_request(self, bucket: str, key: str) -> None:
        if "delete" not in self.query:
            super()._post_request(bucket, key)
            return
        answer = ET.Element("DeleteResult")
        for element in ET.fromstring(self._read_body()).iter():
            if element.tag.endswith("Key"):
                path = self._object_path(bucket, element.text or "")
                if path.is_file():
                    path.unlink()
                    self.server.deleted.append(element.text)
                ET.SubElement(ET.SubElement(answer, "Deleted"), "Key").text = element.text
        self._send_xml(answer)


class ObjectStore:
    """A server with one bucket, `bucket`, in a directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self._port = root, root / "bucket", 0
        self.folder.mkdir(parents=True)
        self.put: list[str] = []
        self.got: list[str] = []
        self.deleted: list[str] = []
        self.start()

    def start(self) -> None:
        handler = type("BoundHandler", (Handler,), {"data_root": self.root})
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), handler)
        self._server.daemon_threads = True
        self._server.put, self._server.got, self._server.deleted = self.put, self.got, self.deleted
        self._port = self._server.server_port
        self.set()
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def set(self, fault: str | None = None, slow: str = "", seconds: float = 0.0) -> None:
        """Let it fail from now on, or wait before it stores objects with a text in their name."""
        self._server.fault, self._server.delay = fault, (slow, seconds)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def use(self) -> None:
        use(self._port)

    @property
    def port(self) -> int:
        return self._port

    def complete(self, run: str) -> list[str]:
        """The names of the complete checkpoints under a prefix."""
        return sorted(path.parent.name for path in (self.folder / run).glob("*/manifest.json"))


def use(port: int) -> None:
    """Let `s3://` of this process mean a server on a port."""
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    register("s3")
    fsspec.config.conf["s3"] = {"retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}}
