"""Questions that are asked of every run, as SQL over the tables of `asyncrl.observe.query.tables`."""

from typing import NamedTuple

from asyncrl.drop_reasons import DropReason


class Ready(NamedTuple):
    says: str
    sql: str


READY = {
    "reward_by_step": Ready(
        "reward of the samples that each step was trained on",
        """
        SELECT step, count(*) AS samples, round(avg(reward), 4) AS reward, min(reward) AS lowest, max(reward) AS highest
        FROM trajectories WHERE step IS NOT NULL GROUP BY step ORDER BY step
        """,
    ),
    "reward_parts_by_step": Ready(
        "mean of each part of the reward, over the samples of each step that have it",
        """
        SELECT step, part.key AS part, count(*) AS samples, round(avg(part.value), 4) AS mean,
            min(part.value) AS lowest, max(part.value) AS highest
        FROM (SELECT step, unnest(map_entries(parts)) AS part FROM trajectories WHERE step IS NOT NULL)
        GROUP BY step, part.key ORDER BY step, part.key
        """,
    ),
    "reward_by_prompt": Ready(
        "the 50 prompts with the least reward",
        """
        SELECT prompt, count(*) AS answers, round(avg(reward), 4) AS reward, round(stddev_pop(reward), 4) AS spread,
            max(step) AS last_step
        FROM trajectories GROUP BY prompt ORDER BY reward, answers DESC, prompt LIMIT 50
        """,
    ),
    "prompts_by_source": Ready(
        "by source of prompts, groups that were finished, how many different prompts they had, and what they earned",
        """
        SELECT coalesce(source, 'all') AS source, count(*) AS groups, count(DISTINCT prompt) AS prompts,
            round(avg(rate), 4) AS reward, round(avg((rate <= 0)::INT), 3) AS unsolved,
            round(avg((rate >= 1)::INT), 3) AS solved
        FROM (
            SELECT any_value(source) AS source, any_value(prompt) AS prompt, avg(reward) AS rate
            FROM trajectories JOIN groups USING (group_id) GROUP BY group_id
        ) GROUP BY ALL ORDER BY ALL
        """,
    ),
    "groups_without_signal": Ready(
        "by step, trained groups whose samples all got the same reward and taught nothing",
        """
        SELECT step, count(*) AS groups, count(*) FILTER (lowest = highest) AS without_signal,
            round(count(*) FILTER (lowest = highest) / count(*), 3) AS share
        FROM (
            SELECT group_id, any_value(step) AS step, min(reward) AS lowest, max(reward) AS highest
            FROM trajectories WHERE step IS NOT NULL GROUP BY group_id
        ) GROUP BY step ORDER BY step
        """,
    ),
    "longest_answers": Ready(
        "the 20 completions with most tokens",
        """
        SELECT group_id, sample, prompt, answer_tokens, round(seconds, 3) AS seconds, reward, finish, fate, step
        FROM trajectories ORDER BY answer_tokens DESC, group_id, sample LIMIT 20
        """,
    ),
    "truncated_by_step": Ready(
        "by step, the share of completions truncated at rollout.max_tokens, and their reward beside the others'",
        """
        SELECT step, count(*) AS samples, round(count(*) FILTER (finish = 'length') / count(*), 4) AS cut,
            round(avg(reward) FILTER (finish = 'length'), 4) AS reward_cut,
            round(avg(reward) FILTER (finish <> 'length'), 4) AS reward_others
        FROM trajectories WHERE step IS NOT NULL GROUP BY step ORDER BY step
        """,
    ),
    "stalest_samples": Ready(
        "the 20 trained samples whose first token was oldest, in policy versions",
        """
        SELECT group_id, sample, prompt, step, staleness, oldest_version, round(seconds, 3) AS seconds, reward, engine
        FROM trajectories WHERE step IS NOT NULL ORDER BY staleness DESC, seconds DESC LIMIT 20
        """,
    ),
    "episodes_by_step": Ready(
        "by step, how long episodes of a harness were, and where their seconds went",
        """
        SELECT step, count(*) AS episodes, round(avg(turns), 2) AS turns, round(avg(tool_calls), 2) AS tool_calls,
            round(avg(seconds), 3) AS seconds, round(sum(model_seconds) / sum(seconds), 3) AS in_model,
            round(sum(tools_seconds) / sum(seconds), 3) AS in_tools,
            round(sum(waiting_seconds) / sum(seconds), 3) AS waiting, round(avg(branches), 2) AS branches,
            sum(wasted_tokens)::BIGINT AS wasted_tokens
        FROM episodes WHERE step IS NOT NULL GROUP BY step ORDER BY step
        """,
    ),
    "branches_by_cause": Ready(
        "why calls of harnesses did not go on from what was sampled before them, and in how many episodes",
        """
        SELECT branch.key AS cause, sum(branch.value)::BIGINT AS branches, count(*) AS episodes,
            round(count(*) / (SELECT count(*) FROM episodes), 3) AS of_episodes
        FROM (SELECT unnest(map_entries(branches_by_cause)) AS branch FROM episodes)
        GROUP BY branch.key ORDER BY branches DESC, cause
        """,
    ),
    "reward_by_turns": Ready(
        "reward of episodes by their number of turns",
        """
        SELECT turns, count(*) AS episodes, round(avg(reward), 4) AS reward, round(avg(tool_calls), 2) AS tool_calls,
            round(avg(sampled_tokens), 1) AS sampled_tokens, round(avg(seconds), 3) AS seconds
        FROM episodes GROUP BY turns ORDER BY turns
        """,
    ),
    "drops_by_reason": Ready(
        "samples that were never trained on, by reason; `stored` were finished, and `tokens` are theirs",
        """
        WITH lost AS (
            SELECT drop_reason AS reason, if(drop_sample IS NULL, size - missing, 1) AS samples
            FROM groups WHERE fate = 'dropped'
            UNION ALL SELECT '$incomplete', size - missing - 1 FROM groups WHERE drop_sample IS NOT NULL
            UNION ALL SELECT reason, samples FROM raw_failures
        ), stored AS (
            SELECT drop_reason AS reason, count(*) AS stored, sum(answer_tokens) AS tokens
            FROM trajectories WHERE fate = 'dropped' GROUP BY ALL
        )
        SELECT reason, sum(samples)::BIGINT AS samples, coalesce(any_value(stored), 0) AS stored,
            coalesce(any_value(tokens), 0)::BIGINT AS tokens
        FROM lost LEFT JOIN stored USING (reason) GROUP BY reason ORDER BY samples DESC, reason
        """.replace("$incomplete", DropReason.GROUP_INCOMPLETE),
    ),
    "drop_meanings": Ready(
        "groups that were dropped, by the reason that ended them, with what it means and what to do",
        """
        SELECT drop_reason AS reason, count(*) AS groups, any_value(meaning) AS meaning, any_value(remedy) AS what_to_do
        FROM groups LEFT JOIN raw_meanings
            ON code = split_part(drop_reason, ':', 1)  -- `stage:NAME` has the meaning of `stage`
        WHERE fate = 'dropped' GROUP BY drop_reason ORDER BY groups DESC, reason
        """,
    ),
    "failures": Ready(
        "the first failure of each of your functions in each way: the error, its line, and what the call got",
        """
        SELECT to_timestamp(time) AS at, fields->>'$.function' AS function, fields->>'$.reason' AS reason,
            fields->>'$.message' AS message, nullif(fields->>'$.source', '') AS line,
            fields->>'$.arguments.prompt' AS prompt, fields->>'$.arguments.completion' AS completion,
            fields->>'$.arguments.turns' AS turns, fields->>'$.arguments.answer' AS answer
        FROM events WHERE kind = 'function_failed' ORDER BY time
        """,
    ),
    "time_per_engine": Ready(
        "completions of each engine, how long they took, and its tokens per second between its first and last one",
        """
        SELECT engine, count(*) AS answers, round(avg(seconds), 3) AS mean_s,
            round(quantile_cont(seconds, 0.95), 3) AS p95_s, round(max(seconds), 3) AS longest_s,
            round(sum(answer_tokens) / (max(finished) - min(started)), 1) AS tokens_per_s
        FROM trajectories GROUP BY engine ORDER BY engine
        """,
    ),
    "waits_by_cause": Ready(
        "how the run's time was spent, as recorded in spans; those of different actors overlap",
        """
        SELECT kind, count(*) AS times, round(sum(seconds), 2) AS total_s, round(avg(seconds), 4) AS mean_s,
            round(max(seconds), 3) AS longest_s,
            round(sum(seconds) / (SELECT max(loop_seconds) FROM metrics), 3) AS of_the_loop
        FROM events WHERE seconds IS NOT NULL GROUP BY kind ORDER BY total_s DESC
        """,
    ),
    "throughput_over_time": Ready(
        "completions per second in each twentieth of the run, and how long they took",
        """
        WITH span AS (SELECT min(finished) AS begun, (max(finished) - min(finished)) / 20 + 1e-9 AS width
            FROM trajectories)
        SELECT round(floor((finished - begun) / width) * width, 1) AS second, count(*) AS answers,
            round(count(*) / any_value(width), 1) AS answers_per_s, round(avg(seconds), 3) AS mean_s,
            round(avg(reward), 4) AS reward
        FROM trajectories, span GROUP BY ALL ORDER BY second
        """,
    ),
}
