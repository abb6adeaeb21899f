-- Begins a life, or renews one of the same epoch.
-- ARGV: prefix, instance id, epoch, TTL of the readable hash in ms, then field, value, ... of the member
local prefix, id, epoch, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local member, replaced = prefix .. 'member:' .. id, prefix .. 'replaced:' .. id
if redis.call('SISMEMBER', replaced, epoch) == 1 then
  return {'refused', ''}
end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local before = redis.call('HGET', member, 'epoch') or ''
local fields = {}
for i = 5, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
redis.call('INCR', prefix .. 'generation')
redis.call('ZADD', prefix .. 'last_seen', now, id)
redis.call('SADD', prefix .. 'instances', id)
if before == epoch then
  redis.call('HSET', member, unpack(fields))
  return {'renewed', ''}
end
if before ~= '' then
  redis.call('SADD', replaced, before)
  redis.call('EXPIRE', replaced, 3600)
  redis.call('HDEL', prefix .. 'loads', id)
end
redis.call('DEL', member, prefix .. 'instance:' .. id)
redis.call('HSET', member, 'state', 'JOINING', 'drained', '0',
  'registered_unix', string.format('%.3f', now / 1000), unpack(fields))
local shown = redis.call('HMGET', member, 'role', 'model', 'address', 'kv_total_tokens')
redis.call('HSET', prefix .. 'instance:' .. id, 'role', shown[1], 'model', shown[2],
  'address', shown[3], 'kv_total_tokens', shown[4], 'epoch', epoch, 'state', 'JOINING')
redis.call('PEXPIRE', prefix .. 'instance:' .. id, ttl)
if before == '' then
  return {'new', ''}
end
return {'replaced', before}
