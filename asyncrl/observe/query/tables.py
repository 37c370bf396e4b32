"""A run's directory as tables for SQL, while the run goes on or long after it.

Nothing is copied, locked or changed: the trajectory log is mapped, and its long columns are read by the queries that
name them. A connection sees the run as it was when it was opened; open another one to see more.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pyarrow

from asyncrl.buffer import journal, payloads
from asyncrl.curriculum.interleaving import BLOCK, Interleaving
from asyncrl.data.untrusted import read_table
from asyncrl.drop_reasons import DESCRIPTIONS, DropReason
from asyncrl.observe.query.group_outcomes import GroupOutcomes, read_group_outcomes
from asyncrl.observe.query.logs import open_files
from asyncrl.observe.query.segments import SCHEMA, as_array, read_trajectories
from asyncrl.system.run_directory import RunDirectory

if TYPE_CHECKING:
    import duckdb

pa = cast(Any, pyarrow)  # its type stubs are incomplete

THREADS = 2
METRICS = {
    "step": pa.int64(),
    "version": pa.int64(),
    "time": pa.float64(),
    "loop_seconds": pa.float64(),
    "samples": pa.int64(),
    "tokens": pa.int64(),
    "reward": pa.float64(),
    "loss": pa.float64(),
    "grad_norm": pa.float64(),
    "skipped": pa.bool_(),
    "staleness_mean": pa.float64(),
    "staleness_max": pa.int64(),
    "length_mean": pa.float64(),
    "length_max": pa.int64(),
    "wait_seconds": pa.float64(),
    "train_seconds": pa.float64(),
    "sync_seconds": pa.float64(),
    "generated_tokens": pa.int64(),
    "reprefilled_tokens": pa.int64(),
    "replicas": pa.int64(),
    "running": pa.int64(),
    "waiting": pa.int64(),
    "in_flight": pa.int64(),
    "buffered": pa.int64(),
    "dropped": pa.int64(),
}
"""Columns that every run has, also before its first step; what else a step recorded comes after them."""
TABLES = {
    "trajectories": "a row for each finished sample",
    "groups": "a row for each group of samples that was admitted",
    "metrics": "a row for each step",
    "events": "spans (with seconds) and moments (without), in the order they were written",
    "evaluations": "a row for each evaluation on held-out prompts",
    "episodes": "a row for each sample that a harness played",
    "turns": "a row for each call of the model in an episode that was answered",
}
SAFE: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,
}
REASONS = "CREATE TABLE raw_reasons AS SELECT unnest(?::VARCHAR[]) AS reason, unnest(range(?)) AS number"
SOURCES = "CREATE TABLE raw_sources AS SELECT unnest(?::VARCHAR[]) AS name, unnest(range(?)) AS number"
FAILURES = "CREATE TABLE raw_failures AS SELECT unnest(?::VARCHAR[]) AS reason, unnest(?::BIGINT[]) AS samples"
LINES = "CREATE TABLE raw_lines AS SELECT ? AS lines"
MEANINGS = """
CREATE TABLE raw_meanings AS
    SELECT unnest(?::VARCHAR[]) AS code, unnest(?::VARCHAR[]) AS meaning, unnest(?::VARCHAR[]) AS remedy
"""
VIEWS = """
CREATE VIEW raw_events AS
    SELECT unnest(json_transform(line, '{"time": "DOUBLE", "seconds": "DOUBLE", "kind": "VARCHAR", "step": "BIGINT",
        "version": "BIGINT", "engine": "VARCHAR", "reason": "VARCHAR", "text": "VARCHAR", "fault": "VARCHAR"}')),
        line::JSON AS fields
    FROM (SELECT unnest(string_split(lines, chr(10))) AS line FROM raw_lines) WHERE json_valid(line);
CREATE VIEW groups AS
    SELECT group_id, prompt_index, name AS source, size, version,
        CASE WHEN dropped >= 0 THEN 'dropped' WHEN step < 0 THEN 'buffered' WHEN step <= committed THEN 'trained'
            ELSE 'training' END AS fate,
        nullif(step, -1) AS step, nullif(take, -1) AS take, reason AS drop_reason,
        nullif(failed, -1)::INTEGER AS drop_sample, missing::INTEGER AS missing
    FROM raw_groups LEFT JOIN raw_reasons r ON r.number = dropped LEFT JOIN raw_sources s ON s.number = source;
CREATE VIEW trajectories AS
    SELECT t.sequence, group_id, t.sample, t.prompt, t.engine, t.precision, t.finish, t.reward,
        try_cast(try_cast(nullif(t.parts, '') AS JSON) AS MAP(VARCHAR, DOUBLE)) AS parts, t.started, t.finished,
        t.finished - t.started AS seconds,
        len(list_filter(t.versions, lambda v: v < 0)) AS prompt_tokens,
        len(t.versions) - len(list_filter(t.versions, lambda v: v < 0)) AS answer_tokens,
        nullif(list_min(t.unsigned_versions), 4294967295)::INTEGER AS oldest_version,
        nullif(list_max(t.versions), -1) AS newest_version,
        coalesce(g.fate, 'ended') AS fate, g.step,
        g.step - nullif(list_min(t.unsigned_versions), 4294967295)::INTEGER AS staleness,
        CASE WHEN g.drop_sample IS NULL OR g.drop_sample = t.sample THEN g.drop_reason
            ELSE '$incomplete' END AS drop_reason,
        t.tokens, t.logprobs, t.versions, nullif(t.route_bytes, 0) AS route_bytes,
        CASE WHEN len(t.teacher_logprobs) > 0 THEN t.teacher_logprobs END AS teacher_logprobs,
        nullif(t.teacher_top_k_bytes, 0) AS teacher_top_k_bytes,
        -- Of those who sampled it: given tokens have log-probability 0, and teachers say nothing of them.
        (list_sum(t.logprobs) - list_sum(t.teacher_logprobs)) / nullif(len(t.teacher_logprobs), 0) AS teacher_kl
    FROM raw_trajectories t LEFT JOIN groups g USING (group_id);
CREATE VIEW raw_episodes AS
    SELECT sequence, group_id, sample,
        list_transform((episode->'$[0]')::JSON[], lambda b: {
            'start': (b->>'$[0]')::BIGINT, 'after': (b->>'$[1]')::BIGINT, 'cause': b->>'$[2]'}) AS branches,
        list_transform((episode->'$[1]')::JSON[], lambda t: {
            'start': (t->>'$[0]')::BIGINT, 'stop': (t->>'$[1]')::BIGINT, 'reward': (t->>'$[2]')::DOUBLE,
            'tool_calls': (t->>'$[3]')::BIGINT}) AS turns,
        (episode->>'$[2]')::DOUBLE AS model_seconds, (episode->>'$[3]')::DOUBLE AS tools_seconds,
        (episode->>'$[4]')::BIGINT AS wasted_tokens
    FROM (SELECT sequence, group_id, sample, nullif(episode, '')::JSON AS episode FROM raw_trajectories)
    WHERE episode IS NOT NULL;
CREATE VIEW episodes AS
    SELECT group_id, e.sample, prompt, reward, fate, step, staleness, finish, engine, started, seconds,
        len(turns) AS turns, coalesce(list_sum(list_transform(turns, lambda t: t.tool_calls)), 0)::BIGINT AS tool_calls,
        model_seconds, tools_seconds, greatest(seconds - model_seconds - tools_seconds, 0) AS waiting_seconds,
        len(branches) AS branches,
        map_from_entries(list_transform(list_sort(list_distinct(list_transform(branches, lambda b: b.cause))),
            lambda c: {'k': c, 'v': len(list_filter(branches, lambda b: b.cause = c))})) AS branches_by_cause,
        answer_tokens AS sampled_tokens, prompt_tokens AS given_tokens, wasted_tokens,
        coalesce(list_sum(list_transform(turns, lambda t: t.reward)), 0) AS turn_rewards
    FROM raw_episodes e JOIN trajectories USING (sequence, group_id);
CREATE VIEW turns AS
    SELECT group_id, sample, number::INTEGER AS turn, t.start, t.stop, t.stop - t.start AS tokens, t.reward,
        t.tool_calls,
        -- The branch by which the call came: the last one between the turn before and this one.
        list_filter(branches, lambda b: b.start <= t.start AND b.start >= before)[-1].cause AS branch
    FROM (
        SELECT group_id, sample, branches, number, turns[number + 1] AS t,
            coalesce(turns[number].stop, 0) AS before
        FROM (SELECT *, unnest(range(len(turns))) AS number FROM raw_episodes)
    );
CREATE MACRO tokens(of_group, of_sample) AS TABLE
    SELECT generate_subscripts(tokens, 1) - 1 AS position, unnest(tokens) AS token, unnest(versions) AS version,
        unnest(logprobs) AS logprob
    FROM trajectories WHERE group_id = of_group AND sample = of_sample;
CREATE VIEW metrics AS FROM raw_metrics;
CREATE VIEW events AS
    SELECT time, seconds, kind, step, version, engine, coalesce(reason, text, fault) AS text, fields FROM raw_events;
CREATE VIEW evaluations AS
    SELECT step, time, seconds, (fields->>'$.scores.sampled')::DOUBLE AS sampled,
        (fields->>'$.scores.greedy')::DOUBLE AS greedy, (fields->>'$.scores.reward')::DOUBLE AS reward,
        (fields->>'$.scores.median_tokens')::DOUBLE AS median_tokens,
        (fields->>'$.scores.p95_tokens')::DOUBLE AS p95_tokens, (fields->>'$.scores.max_tokens')::BIGINT AS max_tokens,
        (fields->'$.scores.by_size')::MAP(VARCHAR, DOUBLE) AS by_size,
        (fields->>'$.scores.passed')::DOUBLE AS passed, (fields->>'$.scores.interval')::DOUBLE AS "interval",
        (fields->'$.scores.suites')::MAP(
            VARCHAR, STRUCT(sampled DOUBLE, greedy DOUBLE, reward DOUBLE, passed DOUBLE, "interval" DOUBLE)
        ) AS suites,
        (fields->'$.scores.by_source')::MAP(VARCHAR, DOUBLE) AS by_source
    FROM events WHERE kind = 'evaluation'
    QUALIFY row_number() OVER (PARTITION BY step ORDER BY time DESC) = 1 ORDER BY step;
""".replace("$incomplete", DropReason.GROUP_INCOMPLETE)


def open_run(directory: Path) -> "duckdb.DuckDBPyConnection":
    """The views that `TABLES` names, and the macro `tokens(group_id, sample)`.

    SQL on the connection reaches these and nothing else: no other file, no network, no extension.
    """
    run = RunDirectory.open(directory)
    with ThreadPoolExecutor(1) as thread:
        buffer = thread.submit(read_buffer, run.trajectories)
        import duckdb  # beside it: this takes a tenth of a second

        connection = duckdb.connect(":memory:", config=SAFE)
        connection.register("raw_metrics", _metrics(run))
        events = run.events.read_bytes() if run.events.exists() else b""
        connection.execute(LINES, [events.decode(errors="replace")])
        trajectories, outcomes = buffer.result()
    connection.register("raw_trajectories", trajectories)
    weights = _weights(run)
    connection.register("raw_groups", _groups(outcomes, list(weights.values())))
    connection.execute(SOURCES, [list(weights), len(weights)])
    connection.execute(REASONS, [outcomes.reasons, len(outcomes.reasons)])
    connection.execute(FAILURES, [list(outcomes.failures), list(outcomes.failures.values())])
    described = DESCRIPTIONS.values()
    connection.execute(
        MEANINGS, [list(DESCRIPTIONS), [each.meaning for each in described], [each.remedy for each in described]]
    )
    connection.execute(VIEWS)
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def read_buffer(directory: Path) -> tuple[Any, GroupOutcomes]:
    """The completions are opened first, so that the journal, opened after them, has the group of each."""
    answers = list(open_files(directory, payloads.STEM, payloads.SCHEMA_HASH))
    decisions = list(open_files(directory, journal.STEM, journal.SCHEMA_HASH))
    with ThreadPoolExecutor(THREADS) as threads:  # numpy and Arrow do not hold the interpreter up
        outcomes = threads.submit(read_group_outcomes, decisions)
        tables = list(threads.map(read_trajectories, answers))
        return pa.Table.from_batches(
            [batch for table in tables for batch in table.to_batches()], SCHEMA
        ), outcomes.result()


def _weights(run: RunDirectory) -> dict[str, float]:
    """Of the sources that the run mixes, in the order of the task; none of one that mixes none."""
    config: Any = msgspec.yaml.decode(run.config.read_bytes())
    sources: dict[str, Any] = (config.get("task") or {}).get("sources") or {}
    return {name: sources[name]["weight"] for name in sorted(sources)}


def _groups(outcomes: GroupOutcomes, weights: Sequence[float]) -> Any:
    (ids,) = np.nonzero(outcomes.known)
    streams = np.array(Interleaving(weights).streams if weights else [-1] * BLOCK)
    columns = {
        "group_id": ids,
        "prompt_index": outcomes.prompts[ids],
        "source": streams[outcomes.prompts[ids] % BLOCK],
        "size": np.full(len(ids), outcomes.size),
        "version": outcomes.versions[ids],
        "step": outcomes.steps[ids],
        "take": outcomes.takes[ids],
        "committed": np.full(len(ids), outcomes.committed),
        "dropped": outcomes.drops[ids],
        "failed": outcomes.failed[ids],
        "missing": outcomes.missing[ids],
    }
    return pa.Table.from_arrays([as_array(values) for values in columns.values()], list(columns))


def _metrics(run: RunDirectory) -> Any:
    if not run.metrics.exists():
        return pa.schema(METRICS).empty_table()
    table = read_table(run.metrics)
    for name, kind in METRICS.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), kind))
    return table.select([*METRICS, *(name for name in table.column_names if name not in METRICS)])
