"""
A Hub on this machine: as much of the protocol as the real client needs to push and pull models, datasets and spaces,
with its access rules, and with faults on demand.
"""

import base64
import hashlib
import json
import os
import re
import secrets
import socket
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".parquet", ".safetensors", ".png")
# As on the Hub, a new repository has a first commit with this file.
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


class HubError(Exception):
    """A request that is refused: status, text for the user, and the code by which the client knows the reason."""

    def __init__(self, status: int, message: str, code: str | None = None, **more):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer = {"error": message} | more


def git_hash(content: bytes) -> str:
    """The name of a file's content in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    part.write_bytes(content)
    os.replace(part, path)


class Repository:
    """
    A repository in a folder: `refs/NAME` holds the id of a branch's last commit, `tags/NAME` that of a tag's commit,
    `commits/ID.json` a commit with all its files, `objects/ID` their contents, regular ones by their git hash and large
    ones by their sha256; a private one has a file `private`.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def exists(self) -> bool:
        return (self.folder / "refs").is_dir()

    def create(self, private: bool = False) -> None:
        if private:
            write_atomically(self.folder / "private", b"")
        self.add_commit("main", "initial commit", {".gitattributes": self.add_regular(GITATTRIBUTES)})

    @property
    def private(self) -> bool:
        return (self.folder / "private").exists()

    def reference(self, kind: str, name: str) -> Path:
        return self.folder / kind / quote(name, safe="")

    def resolve(self, revision: str) -> str:
        """The id of the commit that a branch, a tag or a commit id stands for."""
        for ref in (self.reference("refs", revision), self.reference("tags", revision)):
            if ref.exists():
                return ref.read_text()
        if re.fullmatch("[0-9a-f]{40}", revision) and (self.folder / "commits" / f"{revision}.json").exists():
            return revision
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def commit(self, revision: str) -> dict:
        commit_id = self.resolve(revision)
        return json.loads((self.folder / "commits" / f"{commit_id}.json").read_text()) | {"id": commit_id}

    def files(self, revision: str = "main") -> dict[str, dict]:
        """Path -> object id, size and whether it is a large file."""
        return self.commit(revision)["files"]

    def add_commit(self, branch: str, title: str, files: dict[str, dict]) -> str:
        parent = self.resolve(branch) if self.exists() else None
        commit = {"title": title, "date": now(), "files": files, "parent": parent}
        content = json.dumps(commit).encode()
        commit_id = hashlib.sha1(content).hexdigest()
        write_atomically(self.folder / "commits" / f"{commit_id}.json", content)
        write_atomically(self.reference("refs", branch), commit_id.encode())
        return commit_id

    def history(self, revision: str = "main") -> list[dict]:
        """Commits, the newest first."""
        commits = [self.commit(revision)]
        while commits[-1]["parent"]:
            commits.append(self.commit(commits[-1]["parent"]))
        return commits

    def object_path(self, object_id: str) -> Path:
        return self.folder / "objects" / object_id

    def add_regular(self, content: bytes) -> dict:
        object_id = git_hash(content)
        write_atomically(self.object_path(object_id), content)
        return {"oid": object_id, "size": len(content), "lfs": False}

    def read(self, path: str, revision: str = "main") -> bytes:
        return self.object_path(self.files(revision)[path]["oid"]).read_bytes()


def changed_files(repository: Repository, files: dict[str, dict], operations: list[dict]) -> dict[str, dict]:
    """The files of a commit after the operations of the client."""
    files = dict(files)
    for operation in operations:
        key, value = operation["key"], operation["value"]
        path = value["path"]
        if key == "file":
            files[path] = repository.add_regular(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if not repository.object_path(value["oid"]).exists():
                raise HubError(400, f"{path} was never uploaded")
            files[path] = {"oid": value["oid"], "size": value["size"], "lfs": True}
        elif key in ("deletedFile", "deletedFolder"):
            gone = [name for name in files if name == path or name.startswith(path.rstrip("/") + "/")]
            if not gone:
                raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
            files = {name: file for name, file in files.items() if name not in gone}
        else:
            raise HubError(400, f"unknown operation {key}")
    return files


def file_entry(path: str, file: dict) -> dict:
    """A file as the listings of the Hub describe it."""
    entry = {"type": "file", "path": path, "oid": file["oid"], "size": file["size"]}
    if file["lfs"]:
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{file['oid']}\nsize {file['size']}\n".encode()
        )
        entry["oid"] = git_hash(pointer)
        entry["lfs"] = {"oid": file["oid"], "size": file["size"], "pointerSize": len(pointer)}
    return entry


def entries(commit: dict, expand: bool) -> dict[str, dict]:
    """Path -> description of every file and folder of a commit."""
    found = {path: file_entry(path, file) for path, file in commit["files"].items()}
    folders = {str(folder) for path in found for folder in PurePosixPath(path).parents} - {"."}
    for folder in folders:
        inside = "".join(sorted(found[path]["oid"] for path in commit["files"] if path.startswith(f"{folder}/")))
        found[folder] = {"type": "directory", "path": folder, "oid": git_hash(inside.encode()), "size": 0}
    if expand:
        last = {"id": commit["id"], "title": commit["title"], "date": commit["date"]}
        found = {path: entry | {"lastCommit": last} for path, entry in found.items()}
    return dict(sorted(found.items()))


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last of a Range header; None without one."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
    if not match:
        return None
    start, stop = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
    if start >= stop:
        raise HubError(416, "Range not satisfiable")
    return start, stop


LICENSES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "other")
TASKS = ("text-classification", "token-classification", "robotics", "reinforcement-learning", "other")
SPACE_COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")


def card_problems(metadata: dict) -> list[str]:
    """What the Hub would not accept in the metadata of a card."""
    found = []
    if metadata.get("license", "other") not in LICENSES:
        found.append(f'"license" must be one of {LICENSES}')
    for name in (metadata.get("pipeline_tag", "other"), *metadata.get("task_categories", [])):
        if name not in TASKS:
            found.append(f"{name} is no task")
    for name in ("tags", "datasets", "task_categories"):
        if not all(isinstance(x, str) for x in metadata.get(name, [])):
            found.append(f'"{name}" must be a list of strings')
    for model in metadata.get("model-index", []):
        if not model.get("name"):
            found.append('"model-index[0].name" is required')
        for result in model["results"]:
            named = [result.get("task", {}).get("type"), *map(result.get("dataset", {}).get, ("type", "name"))]
            if not all(named):
                found.append("a result needs a task type, a dataset type and a dataset name")
            if not result.get("metrics") or not all(x.get("type") and "value" in x for x in result["metrics"]):
                found.append("a result needs metrics with type and value")
    colors = [metadata[name] for name in ("colorFrom", "colorTo") if name in metadata]
    if not set(colors) <= set(SPACE_COLORS):
        found.append(f'"colorFrom" and "colorTo" must be one of {SPACE_COLORS}')
    if len(metadata.get("short_description", "")) > 60:
        found.append('"short_description" must have 60 letters at most')
    for config in metadata.get("configs", []):
        if not config.get("config_name") or not all(x["path"] and x["split"] for x in config["data_files"]):
            found.append("a configuration needs a name, and data files with split and path")
    return found


def web_prefix(kind: str) -> str:
    """Of the address of a repository: that of a model has none."""
    return "" if kind == "models" else f"{kind}/"


API = r"/api/(?P<kind>models|datasets|spaces)/(?P<repo_id>[^/]+/[^/]+)"
URL = r"/(?P<kind>datasets/|spaces/)?(?P<repo_id>[^/]+/[^/]+)"
COLLECTION = r"/api/collections/(?P<slug>[^/]+/[^/]+)"
# Method, address, the handler's method, and whether it writes, for which a token is needed.
ROUTES = [
    ("GET", "/api/whoami-v2", "describe_user", False),
    ("POST", "/api/repos/create", "create_repository", True),
    ("POST", "/api/validate-yaml", "validate_card", False),
    ("GET", f"{API}(/revision/(?P<revision>[^/]+))?", "describe", False),
    ("GET", f"{API}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", "list_tree", False),
    ("GET", f"{API}/commits/(?P<revision>[^/]+)", "list_commits", False),
    ("POST", f"{API}/branch/(?P<branch>[^/]+)", "create_branch", True),
    ("POST", f"{API}/tag/(?P<revision>[^/]+)", "create_tag", True),
    ("POST", f"{API}/paths-info/(?P<revision>[^/]+)", "list_paths", False),
    ("POST", f"{API}/preupload/(?P<revision>[^/]+)", "choose_upload_modes", True),
    ("POST", rf"{URL}\.git/info/lfs/objects/batch", "offer_uploads", True),
    ("PUT", "/upload/(?P<ticket>[0-9a-f]+)", "receive_object", False),  # who has a ticket had a token
    ("POST", f"{API}/commit/(?P<revision>[^/]+)", "add_commit", True),
    ("GET", f"{URL}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "send_file", False),
    ("POST", "/api/collections", "create_collection", True),
    ("POST", "/faults", "set_faults", False),  # for tests whose client runs in another process
    ("GET", COLLECTION, "describe_collection", False),
    ("POST", f"{COLLECTION}/items", "add_to_collection", True),
]


class Handler(BaseHTTPRequestHandler):
    """Answers one request; `self.server` is the HubServer."""

    protocol_version = "HTTP/1.1"
    # Head and body in one packet: apart, each answer would wait for the client's delayed acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def answer(self) -> None:
        if self.command == "PUT" and self.server.fault("cut_uploads"):
            self.rfile.read(1000)
            return self.cut()
        self.body = self.read_body()  # also of refused requests: the connection is used again
        try:
            self.route()
        except HubError as error:
            self.send_json(error.answer, error.status, error.headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

    def route(self) -> None:
        address = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(address.query).items()}
        method = "GET" if self.command == "HEAD" else self.command
        for route_method, pattern, name, writes in ROUTES:
            match = re.fullmatch(pattern, address.path)
            if match and method == route_method:
                self.writes = writes
                self.user = self.authenticate()
                given = {key: value and unquote(value) for key, value in match.groupdict().items()}
                return getattr(self, name)(**given)
        raise HubError(404, f"{method} {address.path} is not part of this Hub")

    def authenticate(self) -> str | None:
        """The user whose token was sent; None for a reader without one."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.server.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        if self.writes and not token:
            raise HubError(401, "Invalid username or password.")
        if self.writes and token in self.server.read_only:
            raise HubError(403, "You have provided a token with read access; this needs one with write access.")
        return self.server.tokens.get(token)

    def repository(self, kind: str | None, repo_id: str) -> Repository:
        """A repository that the user may see and, in a request that writes, change."""
        repository = self.server.repository(repo_id, kind.rstrip("/") if kind else "models")
        owner = repo_id.partition("/")[0]
        if not repository.exists() or (repository.private and self.user != owner):
            # As on the Hub, the answer does not tell which of the two it is.
            raise HubError(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if self.writes and self.user != owner:
            raise HubError(403, f"You don't have the rights to write to {repo_id}.")
        return repository

    def describe_user(self) -> None:
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        self.send_json({"type": "user", "name": self.user, "fullname": self.user, "orgs": []})

    def create_repository(self) -> None:
        given = json.loads(self.body)
        repo_id = f"{given.get('organization') or self.user}/{given['name']}"
        kind = f"{given.get('type') or 'model'}s"
        if kind == "spaces" and not given.get("sdk"):
            raise HubError(400, "A Space needs an sdk.")
        url = f"{self.server.url}/{web_prefix(kind)}{repo_id}"
        if given.get("organization") not in (None, self.user):
            raise HubError(403, f"You don't have the rights to create a repository under {given['organization']}.")
        with self.server.lock:
            repository = self.server.repository(repo_id, kind)
            if repository.exists():
                raise HubError(409, "You already created this repository", url=url)
            repository.create(bool(given.get("private") or given.get("visibility") == "private"))
        self.send_json({"url": url, "name": repo_id})

    def validate_card(self) -> None:
        content = json.loads(self.body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
        try:
            metadata = yaml.safe_load(match[1]) if match else {}
        except yaml.YAMLError as error:
            raise HubError(400, "Invalid metadata", errors=[{"message": str(error)}], warnings=[]) from error
        errors = [{"message": problem} for problem in card_problems(metadata or {})]
        if errors:
            raise HubError(400, "Invalid metadata", errors=errors, warnings=[])
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        self.send_json({"errors": [], "warnings": warnings})

    def describe(self, kind: str, repo_id: str, revision: str | None) -> None:
        repository = self.repository(kind, repo_id)
        commit = repository.commit(revision or "main")
        siblings = [{"rfilename": path} for path in commit["files"]]
        facts = {"id": repo_id, "sha": commit["id"], "lastModified": commit["date"], "siblings": siblings}
        self.send_json(facts | {"private": repository.private, "tags": [], "downloads": 0, "likes": 0})

    def list_tree(self, kind: str, repo_id: str, revision: str, path: str | None) -> None:
        commit = self.repository(kind, repo_id).commit(revision)
        found = entries(commit, self.is_set("expand"))
        if path and path not in found:
            raise HubError(404, f"{path} does not exist", "EntryNotFound")
        folder = PurePosixPath(path or ".")
        inside = [entry for name, entry in found.items() if folder in PurePosixPath(name).parents]
        if not self.is_set("recursive"):
            inside = [entry for entry in inside if PurePosixPath(entry["path"]).parent == folder]
        self.send_json(inside)

    def list_commits(self, kind: str, repo_id: str, revision: str) -> None:
        commits = self.repository(kind, repo_id).history(revision)
        shared = {"authors": [{"user": repo_id.partition("/")[0]}], "message": ""}
        self.send_json([{name: x[name] for name in ("id", "title", "date")} | shared for x in commits])

    def create_branch(self, kind: str, repo_id: str, branch: str) -> None:
        repository = self.repository(kind, repo_id)
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        self.add_reference(repository, repository.reference("refs", branch), start)

    def create_tag(self, kind: str, repo_id: str, revision: str) -> None:
        repository = self.repository(kind, repo_id)
        self.add_reference(repository, repository.reference("tags", json.loads(self.body)["tag"]), revision)

    def add_reference(self, repository: Repository, path: Path, revision: str) -> None:
        if path.exists():
            raise HubError(409, f"Reference {path.name} already exists")
        write_atomically(path, repository.resolve(revision).encode())
        self.send_json({})

    def list_paths(self, kind: str, repo_id: str, revision: str) -> None:
        form = parse_qs(self.body.decode())
        expand = form.get("expand", ["false"])[0].lower() == "true"
        found = entries(self.repository(kind, repo_id).commit(revision), expand)
        self.send_json([found[path] for path in form.get("paths", []) if path in found])

    def choose_upload_modes(self, kind: str, repo_id: str, revision: str) -> None:
        there = self.repository(kind, repo_id).files(revision)
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": there.get(file["path"], {}).get("oid"),
            }
            for file in json.loads(self.body)["files"]
        ]
        self.send_json({"files": modes})

    def offer_uploads(self, kind: str | None, repo_id: str) -> None:
        repository, answers = self.repository(kind, repo_id), []
        for wanted in json.loads(self.body)["objects"]:
            answers.append({"oid": wanted["oid"], "size": wanted["size"]})
            path = repository.object_path(wanted["oid"])
            if not path.exists():
                upload = {"href": f"{self.server.url}/upload/{self.server.new_ticket(path)}"}
                answers[-1]["actions"] = {"upload": upload}
        self.send_json({"transfer": "basic", "objects": answers})

    def receive_object(self, ticket: str) -> None:
        path = self.server.tickets.get(ticket)
        if path is None:
            raise HubError(403, "This upload was not offered")
        received = self.server.damaged(self.body) if self.server.fault("damaged_uploads") else self.body
        if hashlib.sha256(received).hexdigest() != path.name:
            raise HubError(400, "The content does not have the announced sha256")
        write_atomically(path, self.body)
        self.send_json({})

    def add_commit(self, kind: str, repo_id: str, revision: str) -> None:
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        repository = self.repository(kind, repo_id)
        with self.server.lock:
            parent = repository.commit(revision)
            if header["value"].get("parentCommit") not in (None, parent["id"]):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            files = changed_files(repository, parent["files"], operations)
            commit_id = repository.add_commit(revision, header["value"]["summary"], files)
        if self.server.fault("cut_answers"):
            return self.cut()
        url = f"{self.server.url}/{web_prefix(kind)}{repo_id}/commit/{commit_id}"
        self.send_json({"success": True, "commitOid": commit_id, "commitUrl": url, "hookOutput": ""})

    def send_file(self, kind: str | None, repo_id: str, revision: str, path: str) -> None:
        repository = self.repository(kind, repo_id)
        commit = repository.commit(revision)
        headers = {"X-Repo-Commit": commit["id"], "Accept-Ranges": "bytes"}
        if path not in commit["files"]:
            error = HubError(404, "Entry not found", "EntryNotFound")
            error.headers |= headers
            raise error
        content = repository.read(path, commit["id"])
        large = commit["files"][path]["lfs"] and self.command == "GET"
        if large and self.server.faults.get("path", path) == path and self.server.fault("damaged_downloads"):
            content = self.server.damaged(content)
        headers |= {"ETag": f'"{commit["files"][path]["oid"]}"', "Content-Type": "application/octet-stream"}
        part = byte_range(self.headers.get("Range"), len(content))
        cut = large and self.server.fault("cut_downloads")
        if part is None:
            return self.send(content, 200, headers, cut)
        start, stop = part
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self.send(content[start:stop], 206, headers, cut)

    def set_faults(self) -> None:
        self.server.faults = json.loads(self.body)
        self.send_json({})

    def create_collection(self) -> None:
        given = json.loads(self.body)
        owner, title = given["namespace"], given["title"]
        if owner != self.user:
            raise HubError(403, f"You don't have the rights to create a collection under {owner}.")
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        slug = f"{owner}/{name}-{hashlib.sha1(f'{owner}/{title}'.encode()).hexdigest()[:24]}"
        path = self.server.collection_path(slug)
        if path.exists():
            raise HubError(409, "This collection already exists", slug=slug)
        facts = {"slug": slug, "title": title, "description": given.get("description"), "owner": owner, "items": []}
        facts |= {"private": given.get("private", False), "position": 0, "theme": "blue", "upvotes": 0}
        self.save_collection(path, facts)

    def describe_collection(self, slug: str) -> None:
        self.send_json(self.collection(slug))

    def add_to_collection(self, slug: str) -> None:
        given = json.loads(self.body)
        with self.server.lock:
            collection = self.collection(slug)
            if any(given["item"] == {"id": item["id"], "type": item["type"]} for item in collection["items"]):
                raise HubError(409, "This item is already in the collection")
            item = given["item"] | {"_id": secrets.token_hex(12), "position": len(collection["items"])}
            item["note"] = {"text": given["note"], "html": given["note"]} if "note" in given else None
            collection["items"].append(item)
            self.save_collection(self.server.collection_path(slug), collection)

    def collection(self, slug: str) -> dict:
        path = self.server.collection_path(slug)
        found = json.loads(path.read_bytes()) if path.exists() else None
        if found is None or (found["private"] and self.user != found["owner"]):
            raise HubError(404, "Collection not found")
        if self.writes and self.user != found["owner"]:
            raise HubError(403, "You don't have the rights to change this collection.")
        return found

    def save_collection(self, path: Path, collection: dict) -> None:
        collection |= {"lastUpdated": now()}
        write_atomically(path, json.dumps(collection).encode())
        self.send_json(collection)

    def is_set(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("true", "1")

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def send_json(self, answer, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(answer).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def cut(self) -> None:
        """Ends the connection in the middle of what it carries."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def send(self, content: bytes, status: int, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if cut:
            self.wfile.write(content[: len(content) // 2])
            self.cut()
        elif self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_) -> None:
        """Says nothing: the client's errors are what the tests look at."""


class HubServer(ThreadingHTTPServer):
    """
    Serves while its context is open; all repositories are in `folder`.

    Args:
        folder: Where repositories are kept: `KIND/OWNER/NAME`, with KIND `models`, `datasets` or `spaces`.
        tokens: Tokens -> the names of their users, who may see and change what is theirs.
        read_only: Those of the tokens that may change nothing.

    `faults` says how many of the next transfers go wrong, by kind: `cut_uploads` and `cut_downloads` end the connection
    in the middle of a large file, `cut_answers` after a commit and before its answer; `damaged_uploads` and
    `damaged_downloads` change a bit of a large file, in the byte `position` (by default the last) and, of downloads,
    only in the file `path`.
    """

    daemon_threads = True

    def __init__(self, folder: Path, tokens: dict[str, str], read_only: tuple[str, ...] = ()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = Path(folder)
        self.tokens = tokens
        self.read_only = read_only
        self.faults: dict[str, int] = {}
        self.tickets: dict[str, Path] = {}
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.thread.join()
        self.server_close()

    def repository(self, repo_id: str, kind: str = "models") -> Repository:
        owner, name = repo_id.split("/")
        if not all(re.fullmatch(r"\w[\w.-]*", part) for part in (owner, name)):
            raise HubError(400, f"{repo_id} is not a name of a repository")
        return Repository(self.folder / kind / owner / name)

    def collection_path(self, slug: str) -> Path:
        return self.folder / "collections" / f"{slug}.json"

    def fault(self, kind: str) -> bool:
        """Whether the transfer that asks is one of those that are to go wrong."""
        with self.lock:
            left = self.faults.get(kind, 0)
            self.faults[kind] = max(0, left - 1)
        return left > 0

    def damaged(self, content: bytes) -> bytes:
        changed = bytearray(content)
        changed[self.faults.get("position", -1)] ^= 1
        return bytes(changed)

    def new_ticket(self, path: Path) -> str:
        """A secret under which the object at `path` may be uploaded: uploads of large files carry no token."""
        ticket = secrets.token_hex(16)
        self.tickets[ticket] = path
        return ticket
