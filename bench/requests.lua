-- wrk's side: one POST after another. Arguments after `--`: "unique" or "one", and a seed that makes keys new each run.

local body = '{"account":"C-4711","amount":1250,"client_ref":"bench"}'
local counter = 0
local mode, seed

function init(args)
  mode, seed = args[1], args[2]
end

function request()
  local key = seed
  if mode == "unique" then
    counter = counter + 1
    key = seed .. "-" .. counter
  end
  return wrk.format("POST", nil, {
    ["Content-Type"] = "application/json",
    ["X-Customer-Id"] = "C-4711",
    ["Idempotency-Key"] = key,
  }, body)
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests": %d, "seconds": %.6f, "p50_ms": %.3f, "p99_ms": %.3f, "broken": %d, "refused": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.timeout, errors.status))
end
