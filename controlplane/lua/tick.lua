-- Takes or extends the publisher's lease where it is free or ours, and returns what a snapshot needs.
-- ARGV: prefix, replica id, lease in ms
-- Returns: seconds, microseconds, 1 where we publish; then the state of the last snapshot,
--   the generation, all loads and all last sightings.
local prefix, me, lease = ARGV[1], ARGV[2], ARGV[3]
local key = prefix .. 'snapshot:publisher'
local time = redis.call('TIME')
local owner = redis.call('GET', key)
if owner and owner ~= me then
  return {time[1], time[2], 0}
end
redis.call('SET', key, me, 'PX', lease)
return {time[1], time[2], 1,
  redis.call('HGETALL', prefix .. 'snapshot:state'),
  redis.call('GET', prefix .. 'generation') or '0',
  redis.call('HGETALL', prefix .. 'loads'),
  redis.call('ZRANGE', prefix .. 'last_seen', 0, -1, 'WITHSCORES')}
