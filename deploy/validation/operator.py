"""What the KubeRay operator refuses after the API server took it: its own rules.

Source: ray-operator/controllers/ray/utils/validation.go of KubeRay v1.7.0, as far as a RayService is
concerned, with its feature gates as they are by default. The operator tells the first breach, this tells all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploy.validation.finding import Finding, Group, Manifest, env_names, groups, place

LONGEST_NAME = 47
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
DURATION = re.compile(r"([0-9.]+(ns|us|µs|ms|s|m|h))+|[0-9]+")
CLOSED_GATES = {  # field of rayClusterConfig: the feature gate that a default operator keeps closed
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}
AUTOSCALER_V2 = "RAY_enable_autoscaler_v2"
TOKEN_AUTH_SINCE = (2, 52)
PRIORITY_SINCE = (2, 56)

Breach = tuple[str, str]  # path, sentence


def check(manifest: Manifest) -> Iterator[Finding]:
    """Findings in a RayService; none in anything else."""
    if manifest.get("kind") != "RayService":
        return
    spec = manifest.get("spec") or {}
    cluster = spec.get("rayClusterConfig") or {}
    parts = list(groups(manifest))
    breaches = [
        *_metadata(manifest.get("metadata") or {}),
        *_service(spec, cluster),
        *_gates(cluster),
        *_authentication(cluster),
        *_fault_tolerance(manifest, cluster, parts),
        *_autoscaler(cluster, parts),
        *(breach for group in parts for breach in _group(group, cluster)),
    ]
    for path, sentence in breaches:
        yield Finding(place(manifest, path), sentence)


def _metadata(metadata: Manifest) -> Iterator[Breach]:
    name = str(metadata.get("name", ""))
    if len(name) > LONGEST_NAME:
        yield "metadata.name", f"has {len(name)} characters; the operator takes at most {LONGEST_NAME}"
    if not DNS_1035.fullmatch(name):
        yield "metadata.name", "must be small letters, digits and hyphens, and begin with a letter"
    timeout = (metadata.get("annotations") or {}).get("ray.io/initializing-timeout")
    if timeout and not (DURATION.fullmatch(timeout) and re.search("[1-9]", timeout)):
        path = "metadata.annotations.ray.io/initializing-timeout"
        yield path, f"must be a duration above 0 such as 30m, not {timeout}"


def _service(spec: Manifest, cluster: Manifest) -> Iterator[Breach]:
    if (spec.get("rayClusterDeletionDelaySeconds") or 0) < 0:
        yield "spec.rayClusterDeletionDelaySeconds", "must not be negative"
    if (cluster.get("upgradeStrategy") or {}).get("type"):
        path = "spec.rayClusterConfig.upgradeStrategy"
        yield path, "is for a RayCluster of its own; a RayService has spec.upgradeStrategy"
    head_service = (cluster.get("headGroupSpec") or {}).get("headService") or {}
    if (head_service.get("metadata") or {}).get("name"):
        path = "spec.rayClusterConfig.headGroupSpec.headService.metadata.name"
        yield path, "is the operator's to choose; remove it"
    strategy = spec.get("upgradeStrategy") or {}
    kind = strategy.get("type")
    if kind not in (None, "None", "NewCluster", "NewClusterWithIncrementalUpgrade"):
        yield "spec.upgradeStrategy.type", "must be NewCluster, NewClusterWithIncrementalUpgrade or None"
    if kind == "NewClusterWithIncrementalUpgrade":
        yield from _incremental(strategy.get("clusterUpgradeOptions") or {}, cluster)


def _incremental(options: Manifest, cluster: Manifest) -> Iterator[Breach]:
    path = "spec.upgradeStrategy.clusterUpgradeOptions"
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent")
    if not cluster.get("enableInTreeAutoscaling"):
        yield "spec.rayClusterConfig.enableInTreeAutoscaling", "must be true for an incremental upgrade"
    if not 0 <= surge <= 100:
        yield f"{path}.maxSurgePercent", "must be from 0 to 100"
    if step is None or not 0 <= step <= min(surge, 100):
        yield f"{path}.stepSizePercent", "must be from 0 to maxSurgePercent"
    if (options.get("intervalSeconds") or 0) <= 0:
        yield f"{path}.intervalSeconds", "must be above 0"
    if not options.get("gatewayClassName"):
        yield f"{path}.gatewayClassName", "is needed for an incremental upgrade"


def _gates(cluster: Manifest) -> Iterator[Breach]:
    for field, gate in CLOSED_GATES.items():
        if field in cluster:
            yield f"spec.rayClusterConfig.{field}", f"is refused unless the operator runs with {gate}=true"


def _authentication(cluster: Manifest) -> Iterator[Breach]:
    options = cluster.get("authOptions") or {}
    path = "spec.rayClusterConfig.rayVersion"
    if options.get("mode") == "token" and _version(cluster) < TOKEN_AUTH_SINCE:
        yield path, "must be 2.52.0 or later, and be given, for authOptions.mode token"
    if options.get("enableK8sTokenAuth"):
        path = "spec.rayClusterConfig.authOptions.enableK8sTokenAuth"
        yield path, "is not for a RayService; use mode token with a secretName"


def _fault_tolerance(manifest: Manifest, cluster: Manifest, parts: list[Group]) -> Iterator[Breach]:
    options = cluster.get("gcsFaultToleranceOptions")
    annotations = manifest.get("metadata", {}).get("annotations") or {}
    head = next((part for part in parts if part.name == "head" and part.containers), None)
    env = env_names(head.containers[0]) if head else set()
    params = (head.spec.get("rayStartParams") or {}) if head else {}
    env_path = f"{head.pod_path}.containers[0].env" if head else ""
    params_path = f"{head.path}.rayStartParams" if head else ""
    if "redis-username" in params or "REDIS_USERNAME" in env:
        where = params_path if "redis-username" in params else env_path
        yield where, "must not name the Redis user; use gcsFaultToleranceOptions.redisUsername"
    if options is None:
        if "RAY_REDIS_ADDRESS" in env and annotations.get("ray.io/ft-enabled", "").lower() != "true":
            yield env_path, "has RAY_REDIS_ADDRESS without gcsFaultToleranceOptions; use redisAddress there"
        return
    path = "spec.rayClusterConfig.gcsFaultToleranceOptions"
    if options.get("backend") == "rocksdb":
        yield (
            f"{path}.backend",
            "is refused unless the operator runs with GCSFaultToleranceEmbeddedStorage=true",
        )
    elif "storage" in options:
        yield f"{path}.storage", "is for the backend rocksdb only"
    for name, field in (("RAY_REDIS_ADDRESS", "redisAddress"), ("REDIS_PASSWORD", "redisPassword")):
        if name in env:
            yield env_path, f"must not have {name} beside gcsFaultToleranceOptions; use {field} there"
    if "redis-password" in params:
        yield params_path, "must not have redis-password; use gcsFaultToleranceOptions.redisPassword"
    for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotations.get(name):
            yield f"metadata.annotations.{name}", "must not stand beside gcsFaultToleranceOptions"


def _autoscaler(cluster: Manifest, parts: list[Group]) -> Iterator[Breach]:
    options = cluster.get("autoscalerOptions") or {}
    path = "spec.rayClusterConfig.autoscalerOptions"
    if (options.get("idleTimeoutSeconds") or 0) < 0:
        yield f"{path}.idleTimeoutSeconds", "must not be negative"
    if "KUBERAY_GEN_AUTOSCALER_START_CMD" in env_names(options):
        yield f"{path}.env", "must not have KUBERAY_GEN_AUTOSCALER_START_CMD, which is the operator's"
    for part in parts:
        if part.name == "head" and part.containers and AUTOSCALER_V2 in env_names(part.containers[0]):
            yield (
                f"{part.pod_path}.containers[0].env",
                f"has {AUTOSCALER_V2}; use autoscalerOptions.version: v2",
            )
        restart = part.pod.get("restartPolicy", "Never")
        if cluster.get("enableInTreeAutoscaling") and options.get("version") == "v2" and restart != "Never":
            yield f"{part.pod_path}.restartPolicy", "must be Never, or left out, with autoscaler v2"


def _group(group: Group, cluster: Manifest) -> Iterator[Breach]:
    spec, params = group.spec, group.spec.get("rayStartParams") or {}
    if not group.containers:
        yield f"{group.pod_path}.containers", "must have at least one container"
    if "labels" in params:
        yield f"{group.path}.rayStartParams.labels", "belong in the group's own field labels"
    if spec.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & params.keys():
        yield f"{group.path}.resources", "must not stand beside resources in rayStartParams; keep one"
    for key, value in (spec.get("labels") or {}).items():
        if not LABEL_KEY.fullmatch(str(key)) or not LABEL_VALUE.fullmatch(str(value)):
            yield f"{group.path}.labels.{key}", f"is no label of Kubernetes: {key}={value}"
    if group.name != "head":
        yield from _sizes(group, cluster)


def _sizes(group: Group, cluster: Manifest) -> Iterator[Breach]:
    spec, v2 = group.spec, (cluster.get("autoscalerOptions") or {}).get("version") == "v2"
    least, most = spec.get("minReplicas"), spec.get("maxReplicas")
    autoscaling = cluster.get("enableInTreeAutoscaling")
    if not autoscaling and (least is None or most is None):
        yield group.path, "needs minReplicas and maxReplicas where enableInTreeAutoscaling is not true"
    for name, value in (("minReplicas", least), ("maxReplicas", most)):
        if (value or 0) < 0:
            yield f"{group.path}.{name}", "must not be negative"
    if least is not None and most is not None and least > most:
        yield f"{group.path}.minReplicas", f"is {least}, above maxReplicas, which is {most}"
    if spec.get("suspend"):
        yield f"{group.path}.suspend", "is for a RayJob, and not with the autoscaler; remove it"
    idle = spec.get("idleTimeoutSeconds")
    if idle is not None and (idle < 0 or not v2):
        yield (
            f"{group.path}.idleTimeoutSeconds",
            "must not be negative, and needs autoscalerOptions.version: v2",
        )
    if spec.get("priority") and (not v2 or _version(cluster) < PRIORITY_SINCE):
        yield f"{group.path}.priority", "needs autoscalerOptions.version: v2 and rayVersion 2.56.0 or later"


def _version(cluster: Manifest) -> tuple[int, ...]:
    """(2, 60) of "2.60.0"; (0,) where there is none."""
    found = re.match(r"v?(\d+)\.(\d+)", str(cluster.get("rayVersion") or ""))
    return (int(found[1]), int(found[2])) if found else (0,)
