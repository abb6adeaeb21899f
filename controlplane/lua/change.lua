-- Takes a step of an instance's life, unless something happened since it was decided.
-- ARGV: prefix, instance id, epoch, state and drained before, state and drained after,
--   last sighting in ms that the decision rests on ('' where it does not rest on silence),
--   TTL in ms of the readable hash
local prefix, id = ARGV[1], ARGV[2]
local member, shown = prefix .. 'member:' .. id, prefix .. 'instance:' .. id
local now = redis.call('HMGET', member, 'epoch', 'state', 'drained', 'role', 'model', 'address')
if now[1] ~= ARGV[3] or now[2] ~= ARGV[4] or now[3] ~= ARGV[5] then
  return 0
end
if ARGV[8] ~= '' then
  local seen = redis.call('ZSCORE', prefix .. 'last_seen', id)
  if seen and tonumber(seen) > tonumber(ARGV[8]) then
    return 0
  end
end
redis.call('INCR', prefix .. 'generation')
if ARGV[6] == 'GONE' then
  redis.call('DEL', member, shown)
  redis.call('HDEL', prefix .. 'loads', id)
  redis.call('ZREM', prefix .. 'last_seen', id)
  redis.call('SREM', prefix .. 'instances', id)
  return 1
end
redis.call('HSET', member, 'state', ARGV[6], 'drained', ARGV[7])
if ARGV[6] == 'STALE' then
  -- What was measured is not true any more; that it is there, and silent, is.
  redis.call('DEL', shown)
  redis.call('HSET', shown, 'role', now[4], 'model', now[5], 'address', now[6],
    'epoch', now[1], 'state', 'STALE')
  redis.call('PEXPIRE', shown, ARGV[9])
elseif redis.call('EXISTS', shown) == 1 then
  redis.call('HSET', shown, 'state', ARGV[6])
end
return 1
