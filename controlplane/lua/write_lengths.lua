-- Replaces the folded lengths and the cursor they are folded up to, if the lease is ours.
-- ARGV: prefix, replica id, cursor, version, time the weights are decayed to, number of models,
--   then for each: model, number n, and n times key, weights
local prefix = ARGV[1]
if redis.call('GET', prefix .. 'snapshot:publisher') ~= ARGV[2] then
  return 0
end
local state = prefix .. 'lengths'
for model in string.gmatch(redis.call('HGET', state, 'models') or '', '[^\n]+') do
  redis.call('DEL', prefix .. 'lengths:' .. model)
end
local models, at = {}, 7
for _ = 1, tonumber(ARGV[6]) do
  local model, count = ARGV[at], tonumber(ARGV[at + 1])
  at = at + 2
  models[#models + 1] = model
  for i = at, at + 2 * count - 1, 2 do
    redis.call('HSET', prefix .. 'lengths:' .. model, ARGV[i], ARGV[i + 1])
  end
  at = at + 2 * count
end
redis.call('HSET', state, 'cursor', ARGV[3], 'version', ARGV[4], 'counted_unix', ARGV[5],
  'models', table.concat(models, '\n'))
return 1
